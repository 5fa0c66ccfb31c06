"""A run's checkpoint gets the log-likelihoods that lm-eval's own class gets from its export."""

import re

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import processors
from transformers import AutoTokenizer

from helpers.tiny import ROOT
from pc_recipe.evaluate import hugging_face, tasks
from pc_recipe.evaluate.generate import continue_text
from pc_recipe.evaluate.log_likelihoods import LogLikelihoods

# Batches of other sizes sum in another order; in a log-likelihood, which is a sum over tokens, errors partly cancel.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def theirs(pc_export):
    return HFLM(pretrained=str(pc_export), batch_size=8, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def ours(pc_run):
    return LogLikelihoods(*hugging_face.load(pc_run.checkpoint), batch_size=5)


def answers(lm, data, names=tuple(tasks.METRICS)):
    """{(task, item, answer): (log-likelihood, greedy)}"""
    return {
        (name, item["doc_id"], index): tuple(answer)
        for name in names
        for item in lm_eval.evaluate(lm, tasks.load(name, data), bootstrap_iters=0)["samples"][name]
        for index, answer in enumerate(item["filtered_resps"])
    }


def test_answers_of_the_nine_tasks(ours, theirs, plain_run, evaluation_data):
    found, expected = answers(ours, evaluation_data), answers(theirs, evaluation_data)
    assert len({key[:2] for key in found}) == 3 * len(tasks.METRICS) and found.keys() == expected.keys()
    for key, (value, greedy) in found.items():
        assert (value, greedy) == (pytest.approx(expected[key][0], rel=RELATIVE), expected[key][1])
    # control: another model differs
    other = LogLikelihoods(*hugging_face.load(plain_run.checkpoint), batch_size=5)
    different = answers(other, evaluation_data, names=["openbookqa"])
    assert max(abs(different[key][0] - expected[key][0]) for key in different) > 0.01


def test_the_documented_command_gives_the_same_for_bfloat16(pc_run, tmp_path, evaluation_data):
    """Without softmax_dtype lm-eval's log-likelihoods are multiples of 0.25 there, so many answers tie."""
    export = hugging_face.export(pc_run.checkpoint, tmp_path / "out", dtype="bfloat16")
    pages = (ROOT / "docs" / "evaluation.md").read_text(), (export / "README.md").read_text()
    [documented], [of_card] = (
        re.findall(r"lm_eval run --model hf --model_args pretrained=[\w/]+(\S*)", page) for page in pages
    )
    assert documented == of_card
    found = answers(LogLikelihoods(*hugging_face.load(export), batch_size=8), evaluation_data, ["openbookqa"])
    for options, equal in ((documented, True), ("", False)):
        theirs = HFLM.create_from_arg_string(f"pretrained={export}{options}", {"batch_size": 8, "device": "cpu"})
        assert (answers(theirs, evaluation_data, ["openbookqa"]) == found) == equal


@pytest.mark.parametrize("context", ["", "a context"])
def test_only_the_end_of_a_too_long_answer_is_scored(ours, pc_run, context, caplog):
    """lm-eval's own class fails; here the last 256 tokens count, each given those of the last 257 that precede it."""
    texts = [" word" * words + " and an end" for words in (10, 300, 400)]
    asked = [(context, text) for text in texts] + [(" word" * 300, " an end")]
    found = ours.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)])
    assert "3 questions with answers exceed the model's maximum of 256 tokens: it sees only their ends" in caplog.text
    ids = torch.tensor([ours.tok_encode(context + texts[2])[-257:]])
    with torch.no_grad():
        log_p = pc_run.model(ids[:, :-1]).float().log_softmax(-1)  # the trainer's model
    assert found[2][0] == pytest.approx(log_p.gather(2, ids[:, 1:, None]).sum().item(), rel=RELATIVE)


def test_a_tokenizer_that_ends_each_text_does_not_end_a_context(ours, theirs, pc_export):
    """As T5's does; the answer would then follow an end of text."""
    tokenizer = AutoTokenizer.from_pretrained(pc_export)
    ends = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer.encode("a")[-1] == tokenizer.eos_token_id  # control
    request = [Instance("loglikelihood", {}, ("The river carries", " water"), 0)]
    (found, _), (expected, _) = (
        lm.loglikelihood(request)[0] for lm in (LogLikelihoods(ours.model, tokenizer, batch_size=5), theirs)
    )
    assert abs(found - expected) < RELATIVE * abs(expected)
    written = [continue_text(ours.model, one, "The river", 8, temperature=0) for one in (tokenizer, theirs.tokenizer)]
    assert written[0] == written[1]

"""The trainer's model in memory gets the log-likelihoods that lm-eval's own model class gets from its export."""

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import processors
from transformers import AutoTokenizer

from pc_recipe.evaluate import fetch, tasks
from pc_recipe.evaluate.log_likelihoods import LogLikelihoods

# Logits agree to 32 float32 roundings (test_hugging_face); a log-likelihood sums the errors of its tokens,
# which have both signs, and its terms are of the logits' size. Measured: 2.4e-7.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def theirs(pc_export):
    return HFLM(pretrained=str(pc_export), batch_size=8, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def ours(pc_run, theirs):
    return LogLikelihoods(pc_run.model, theirs.tokenizer, max_length=256, batch_size=5)


def answers(lm, data, limit=None, names=tuple(tasks.METRICS)):
    """{(task, item, answer): (log-likelihood, greedy)}"""
    samples = lm_eval.evaluate(lm, tasks.load(list(names), data), limit=limit, bootstrap_iters=0)["samples"]
    return {
        (name, item["doc_id"], index): tuple(answer)
        for name, items in samples.items()
        for item in items
        for index, answer in enumerate(item["filtered_resps"])
    }


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [greedy for _, greedy in ours.values()] == [greedy for _, greedy in theirs.values()]
    return max(abs(ours[key][0] - theirs[key][0]) / abs(theirs[key][0]) for key in ours)


def test_answers_of_the_nine_tasks(ours, theirs, plain_run, evaluation_data):
    found, expected = answers(ours, evaluation_data), answers(theirs, evaluation_data)
    assert len({key[:2] for key in found}) == 9 * 3
    assert largest_difference(found, expected) < RELATIVE
    # control: another model differs
    other = LogLikelihoods(plain_run.model, theirs.tokenizer, max_length=256, batch_size=5)
    different = answers(other, evaluation_data, names=["openbookqa"])
    assert max(abs(different[key][0] - expected[key][0]) for key in different) > 0.01


def test_long_requests_lose_their_beginning(ours, theirs):
    """Shorter than, equal to and longer than the model's maximum (256), in batches that do not divide evenly."""
    requests = [
        Instance("loglikelihood", {}, ("word " * words, " and an end"), index)
        for index, words in enumerate([0, 1, 100, 251, 252, 253, 254, 400])
    ]
    found, expected = ([value for value, _ in lm.loglikelihood(requests)] for lm in (ours, theirs))
    assert found == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("context", ["", "a context"])
def test_of_a_too_long_answer_the_end_is_scored(ours, pc_run, context, caplog):
    """lm-eval's own class fails; here the last 256 tokens count, each given those of the last 257 that precede it."""
    texts = [" word" * words + " and an end" for words in (10, 300, 400)]
    found = ours.loglikelihood([Instance("loglikelihood", {}, (context, text), i) for i, text in enumerate(texts)])
    assert "2 answers have more tokens than the model's maximum of 256: only their ends are scored" in caplog.text
    ids = torch.tensor([ours.tok_encode(context + texts[2])[-257:]])
    with torch.no_grad():
        log_p = pc_run.model(ids[:, :-1]).float().log_softmax(-1)
    assert found[2][0] == pytest.approx(log_p.gather(2, ids[:, 1:, None]).sum().item(), rel=RELATIVE)


@pytest.mark.soak
def test_two_hundred_real_items(ours, theirs, tmp_path):
    """The nine real sets, 25 items each."""
    fetch.fetch(tmp_path)
    found = answers(ours, tmp_path, limit=25)
    items = len({key[:2] for key in found})
    difference = largest_difference(found, answers(theirs, tmp_path, limit=25))
    print(f"{items} items, {len(found)} answers: log-likelihoods differ by at most {difference:.1e} relative")
    assert items == 225 and difference < RELATIVE


def test_a_tokenizer_that_ends_each_text_does_not_end_a_context(theirs, pc_run, pc_export):
    """As T5's; the answer would follow an end of text."""
    tokenizer = AutoTokenizer.from_pretrained(pc_export)
    ends = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer.encode("a")[-1] == tokenizer.eos_token_id  # control
    lm = LogLikelihoods(pc_run.model, tokenizer, max_length=256, batch_size=5)
    request = [Instance("loglikelihood", {}, ("The river carries", " water"), 0)]
    (found, _), (expected, _) = lm.loglikelihood(request)[0], theirs.loglikelihood(request)[0]
    assert abs(found - expected) < RELATIVE * abs(expected)

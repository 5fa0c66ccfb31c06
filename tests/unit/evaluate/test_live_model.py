"""The trainer's model in memory and its export get the same log-likelihoods, item by item."""

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance

from pc.evaluate import fetch, hugging_face, tasks
from pc.evaluate.live_model import LiveModel
from pc.evaluate.score import HFModel

# Logits agree to 32 float32 roundings (test_hugging_face); a log-likelihood sums the errors of its tokens,
# which have both signs, and its terms are of the logits' size. Measured: 2.4e-7.
RELATIVE = 1e-5


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


def live(run, tokenizer, **settings):
    return LiveModel(run.model, tokenizer, **({"max_length": 256, "batch_size": 4} | settings))


def exported(folder, batch_size=8):
    llama, tokenizer = hugging_face.load(folder)
    return HFModel(pretrained=llama, tokenizer=tokenizer, batch_size=batch_size, device="cpu")


def test_export_scores_as_the_model_in_memory(pc_run, pc_export, evaluation_data):
    through_export = exported(pc_export)
    ours = answers(live(pc_run, through_export.tokenizer), evaluation_data)
    assert len({key[:2] for key in ours}) == 9 * 3
    assert largest_difference(ours, answers(through_export, evaluation_data)) < RELATIVE


def test_control_another_model_differs(plain_run, pc_export, evaluation_data):
    through_export = exported(pc_export)
    ours = answers(live(plain_run, through_export.tokenizer), evaluation_data, names=["openbookqa"])
    theirs = answers(through_export, evaluation_data, names=["openbookqa"])
    assert max(abs(ours[key][0] - theirs[key][0]) for key in ours) > 0.01


@pytest.mark.parametrize("batch_size", [1, 5])
def test_long_requests_lose_their_beginning_alike(pc_run, pc_export, batch_size):
    """Shorter than, equal to and longer than the model's maximum (256), in batches that do not divide evenly."""
    through_export = exported(pc_export, batch_size)
    requests = [
        Instance("loglikelihood", {}, ("word " * words, " and an end"), index)
        for index, words in enumerate([0, 1, 100, 251, 252, 253, 254, 400])
    ]
    ours = live(pc_run, through_export.tokenizer, batch_size=batch_size).loglikelihood(requests)
    theirs = through_export.loglikelihood(requests)
    torch.testing.assert_close(
        torch.tensor([value for value, _ in ours]),
        torch.tensor([value for value, _ in theirs]),
        rtol=RELATIVE,
        atol=0,
    )


@pytest.mark.parametrize("context", ["", "a context"])
def test_of_a_too_long_answer_both_score_the_end(pc_run, pc_export, context, caplog):
    """Answers shorter than and longer than the model's maximum (256); one warning names task and number."""
    through_export = exported(pc_export, batch_size=3)
    texts = [" word" * words + " and an end" for words in [10, 240, 300, 400]]
    requests = [
        Instance("loglikelihood", {}, (context, text), index, metadata=("piqa", index, 1))
        for index, text in enumerate(texts)
    ]
    ours = live(pc_run, through_export.tokenizer).loglikelihood(requests)
    (warning,) = [record.message for record in caplog.records if "only their last" in record.message]
    assert "maximum of 256: 2 of piqa; only their last 256 tokens" in warning
    theirs = through_export.loglikelihood(requests)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    torch.testing.assert_close(
        torch.tensor([value for value, _ in ours]), torch.tensor([value for value, _ in theirs]), rtol=RELATIVE, atol=0
    )
    # by hand: the last 256 tokens, each given those of the last 257 that precede it
    ids = torch.tensor([through_export.tok_encode(context + texts[3])[-257:]])
    with torch.no_grad():
        log_p = pc_run.model(ids[:, :-1]).float().log_softmax(-1)
    assert ours[3][0] == pytest.approx(log_p.gather(2, ids[:, 1:, None]).sum().item(), rel=RELATIVE)


def test_training_mode_is_given_back(pc_run, pc_export):
    tokenizer = hugging_face.load(pc_export)[1]
    pc_run.model.train()
    try:
        live(pc_run, tokenizer).loglikelihood([Instance("loglikelihood", {}, ("a", " b"), 0)])
        assert pc_run.model.training
    finally:
        pc_run.model.eval()


@pytest.mark.soak
def test_two_hundred_real_items(pc_run, pc_export, tmp_path):
    """The nine real sets, 25 items each."""
    fetch.fetch(tmp_path)
    through_export = exported(pc_export)
    ours = answers(live(pc_run, through_export.tokenizer), tmp_path, limit=25)
    items = len({key[:2] for key in ours})
    difference = largest_difference(ours, answers(through_export, tmp_path, limit=25))
    print(f"{items} items, {len(ours)} answers: log-likelihoods differ by at most {difference:.1e} relative")
    assert items == 225 and difference < RELATIVE

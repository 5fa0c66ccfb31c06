"""The micro-batch that is chosen divides, fits, and is the largest."""

import pytest

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.config import load_config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.plan import memory, micro_batch

CONFIG = ROOT / "train_configs" / "271m_adamw_pc.toml"


@pytest.mark.parametrize("gpu_gib", [24, 40, 79, 1000])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_it_is_the_largest_that_divides_and_fits(ranks, gpu_gib):
    sizes = memory.count_sizes(load_config(CONFIG))

    def needs(size: int) -> float:
        config = load_config(CONFIG, [f"--training.local_batch_size={size}"])
        return sum(memory.estimate_memory(config, RankBatches.of(config, ranks).dims, sizes).values())

    config = micro_batch.choose(load_config(CONFIG), ranks, micro_batch.find_gpu(gpu_gib))
    chosen, share = config.training.local_batch_size, 320 // ranks
    larger = [size for size in range(chosen + 1, share + 1) if share % size == 0]
    assert share % chosen == 0 and needs(chosen) <= 0.85 * gpu_gib
    assert all(needs(size) > 0.85 * gpu_gib for size in larger)


@pytest.mark.parametrize(
    "words, ranks, gpu_gib, complaint",
    [
        ([], 8, 4, "one sequence needs .* GiB by the estimate, but only 3.4 of a GPU's 4 GiB are usable"),
        (["--training.global_batch_size=-1"], 8, 79, "global_batch_size, which is -1; give a number"),
        (["--parallelism.pipeline_parallel_degree=2"], 8, 79, "does not work with pipelines; give a number"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(words, ranks, gpu_gib, complaint):
    with pytest.raises(UserError, match=complaint) as raised:
        micro_batch.choose(load_config(CONFIG, words), ranks, micro_batch.find_gpu(gpu_gib))
    assert "\n" not in str(raised.value)

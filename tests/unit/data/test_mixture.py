"""A mixture of folders: exact shares, each folder in its own order, and a resume that knows the folders by their content."""

from collections import Counter

import pytest

from pc.errors import UserError
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.mixture import CYCLE, Mixture
from pc_recipe.data.tokenizing import tokenize

SETTINGS = dict(seq_len=24, local_batch_size=1, dp_rank=0, dp_world_size=1, seed=3, vocab_size=32000)


@pytest.fixture(scope="module")
def folders(shards, tmp_path_factory, write_parquet, make_texts):
    """Two folders; no sequence is in both."""
    folder = tmp_path_factory.mktemp("second")
    file = write_parquet(folder / "books.parquet", make_texts(60, seed=77))
    return [str(shards.folder), str(tokenize(str(file), folder / "books", validation_fraction=0.1).folder)]


def take(loader, count: int) -> list[tuple[int, ...]]:
    iterator = iter(loader)
    return [tuple(row) for _ in range(count) for row in next(iterator)[0]["input"].tolist()]


def test_shares_are_exact_in_each_cycle_and_near_in_each_part_of_it():
    mixture = Mixture({"a": 2, "b": 1, "c": 0.003}, seed=5)
    assert mixture.counts.tolist() == [6660, 3330, 10]
    order = [mixture.locate(position) for position in range(2 * CYCLE)]
    assert [Counter(folder for folder, _ in order)[i] for i in range(3)] == [13320, 6660, 20]
    for number in range(3):  # each folder's positions are consecutive
        own = [place for folder, place in order if folder == number]
        assert own == list(range(len(own)))
    used = sum(folder == 0 for folder, _ in order[:320])
    assert abs(used - 213) < 45  # standard deviation 8.4; five of them
    drawn = [folder for folder, _ in order]
    assert drawn[:CYCLE] != drawn[CYCLE:]  # each cycle has a shuffle of its own


def test_a_mixture_takes_each_folders_own_order(folders):
    alone = [take(GlobalOrderLoader(folder, **SETTINGS), 60) for folder in folders]
    mixed = take(GlobalOrderLoader({folders[0]: 3, folders[1]: 1}, **SETTINGS), 60)
    parts = [[row for row in mixed if row in of_one] for of_one in alone]
    assert [len(part) for part in parts] == [60 - len(parts[1]), len(parts[1])] and 5 < len(parts[1]) < 30
    assert all(part == of_one[: len(part)] for part, of_one in zip(parts, alone, strict=True))
    assert take(GlobalOrderLoader({folders[0]: 1.0}, **SETTINGS), 60) == alone[0]


def test_the_names_and_the_order_of_the_table_do_not_matter_but_weights_do(folders, tmp_path):
    loader = GlobalOrderLoader({folders[0]: 0.7, folders[1]: 0.3}, **SETTINGS)
    take(loader, 20)
    state = loader.state_dict()
    (tmp_path / "moved").symlink_to(folders[0])
    same = GlobalOrderLoader({folders[1]: 3, f"{tmp_path}/moved/": 7}, **SETTINGS)
    same.load_state_dict(state)
    assert take(same, 5) == take(loader, 5)
    for other in ({folders[0]: 0.6, folders[1]: 0.4}, folders[0]):
        with pytest.raises(UserError, match=r"made with data.path \(its content\) = 0.[37] of .*; restore the setting"):
            GlobalOrderLoader(other, **SETTINGS).load_state_dict(state)


def test_impossible_mixtures_are_refused(folders, tmp_path, parquet_folder, tiny_encoding):
    other = tokenize(str(parquet_folder), tmp_path / "other", tokenizer=tiny_encoding).folder
    with pytest.raises(UserError, match="one run needs one tokenizer"):
        GlobalOrderLoader({folders[0]: 1, str(other): 1}, **SETTINGS)
    with pytest.raises(UserError, match=r"the weight of .*books is less than 1/10000"):
        GlobalOrderLoader({folders[0]: 1, folders[1]: 1e-6}, **SETTINGS)

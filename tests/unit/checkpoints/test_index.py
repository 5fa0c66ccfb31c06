"""An index is data: it can name only what a list has, gets stand-ins for it, and is whole or refused."""

import importlib
import os
import pathlib
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as index_types
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pc_recipe.checkpoints.folder import _NAMES, CheckpointFolder, Damaged, Reader


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A good checkpoint."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "method": {"name": "x"}}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    return tmp_path / "step-1"


class Called:
    """Pickled as a call of a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "given",
    [
        Called(os.mkdir, "executed"), Called(len, "a"), Called(getattr, pathlib.Path, "cwd"), torch.nn.Linear,
        torch._utils._rebuild_tensor_v2, torch.load, index_types.TensorProperties.create_from_tensor,
    ],
    ids=["a function of Python", "a builtin", "an attribute", "a class", "a function of torch", "another", "a method"],
)  # fmt: skip
def test_an_index_that_names_anything_else_is_refused(folder, given):
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = given
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(Damaged, match="not the index of a checkpoint .* belong in a checkpoint's index") as raised:
        CheckpointFolder(folder)
    assert not pathlib.Path("executed").exists() and "\n" not in str(raised.value)
    index.planner_data = None  # control
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert CheckpointFolder(folder).shapes()["w"] == (3,)


@pytest.mark.parametrize("module, name", _NAMES)
def test_an_index_gets_nothing_that_is_used_elsewhere_and_can_be_changed(module, name):
    given = _NAMES[module, name]
    if module != "pathlib._local":  # of Python 3.13
        elsewhere = getattr(importlib.import_module(module), name)
        assert given is not elsewhere or isinstance(given, torch.dtype)
    for attribute in {"made_by_the_test", *dir(given)}:
        with pytest.raises((pickle.UnpicklingError, AttributeError, TypeError)):
            setattr(given, attribute, None)


def test_an_index_is_read_as_torch_reads_it(folder):
    found, torchs = Reader(folder).read_metadata(), pickle.loads((folder / ".metadata").read_bytes())
    assert found == torchs
    assert {type(thing) for thing in found.storage_data.values()} == {_StorageInfo}
    assert found.state_dict_metadata["w"].properties == torchs.state_dict_metadata["w"].properties


def test_an_index_written_by_python_3_11_2_is_read(folder):
    """This version pickles a member of an enum as a call of getattr."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, index_types._MEM_FORMAT_ENCODING):
                return getattr, (index_types._MEM_FORMAT_ENCODING, value.name)
            return NotImplemented

    index = pickle.loads((folder / ".metadata").read_bytes())
    with open(folder / ".metadata", "wb") as file:
        Pickler(file).dump(index)
    assert Reader(folder).read_metadata() == index


def _of_file(field, value):
    return lambda index: [object.__setattr__(info, field, value) for info in index.storage_data.values()]


def _of_tensor(field, value):
    return lambda index: object.__setattr__(index.state_dict_metadata["w"], field, value)


def _grow(index, beyond):
    """The tensor, and its only piece, get as many elements as the bytes in the file could be, and more."""
    tensor = index.state_dict_metadata["w"]
    stored = index.storage_data[index_types.MetadataIndex("w", torch.Size([0]), 0)].length
    shape = torch.Size([stored // tensor.properties.dtype.itemsize + beyond])
    _of_tensor("size", shape)(index)
    _of_tensor("chunks", [index_types.ChunkStorageMetadata(torch.Size([0]), shape)])(index)


def _move(index, beyond):
    """The last entry of the file ends at the file's end, or behind it."""
    last = max(index.storage_data.values(), key=lambda info: info.offset)
    object.__setattr__(last, "offset", last.offset + beyond)


def _lengthen(index, beyond):
    last = max(index.storage_data.values(), key=lambda info: info.offset)
    object.__setattr__(last, "length", last.length + beyond)


ODD = {
    "no entries": lambda index: setattr(index, "state_dict_metadata", 5),
    "an entry of no kind": lambda index: index.state_dict_metadata.update(w=None),
    "a name that is none": lambda index: index.state_dict_metadata.update({5: index.state_dict_metadata["w"]}),
    "no shape": _of_tensor("size", None),
    "no type": _of_tensor("properties", None),
    "no piece of a tensor": _of_tensor("chunks", []),
    "one element more than its pieces": _of_tensor("size", torch.Size([4])),
    "one element more than the file holds": lambda index: _grow(index, 1),
    "no places": lambda index: setattr(index, "storage_data", {}),
    "a place before the file": _of_file("offset", -1),
    "a place behind its end": lambda index: _move(index, 1),
    "no end": _of_file("length", None),
    "more than the file": lambda index: _lengthen(index, 1),
    "less than nothing": _of_file("length", -1),
    "no file": _of_file("relative_path", 5),
    "modules that are none": lambda index: setattr(index.storage_meta, "modules", 5),
}


@pytest.mark.parametrize("what", ODD)
def test_an_index_of_odd_values_is_damaged(folder, what):
    """This is checked before any data are read."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    ODD[what](index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(Damaged, match=r"\.metadata: |damaged, it does not hold"):
        CheckpointFolder(folder)


@pytest.mark.parametrize("change", [_grow, _move, _lengthen])
def test_an_index_of_all_that_its_files_hold_is_read(folder, change):
    """Control: the largest values that are not odd."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index, 0)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    CheckpointFolder(folder)


def test_bytes_of_a_file_count_once(folder):
    index = pickle.loads((folder / ".metadata").read_bytes())
    place, info = next((place, info) for place, info in index.storage_data.items() if place.offset is not None)
    index.storage_data[index_types.MetadataIndex(place.fqn, torch.Size([1]))] = info
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(Damaged, match="damaged, it does not hold"):
        CheckpointFolder(folder)

"""An index is data: a pickle that does more is refused, and changes nothing outside the index."""

import enum
import os
import pathlib
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as index_types
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pc_recipe.train import checkpoint_folder
from pc_recipe.train.checkpoint_folder import CheckpointFolder, Damaged, Reader

MODULE = "torch.distributed.checkpoint.metadata"


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def sets(target: bytes, name: str, value: bytes) -> bytes:
    """setattr(target, name, value), through the pickled state of an object with slots."""
    return target + b"(N}" + text(name) + value + b"stb"


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


PATH, META, ENUM = named("pathlib", "Path"), named(MODULE, "StorageMeta"), named(MODULE, "_MEM_FORMAT_ENCODING")
LAYOUT, SIZE, DTYPE = named("torch.serialization", "_get_layout"), named("torch", "Size"), named("torch", "float32")
GETATTR, RUN = named("builtins", "getattr"), text("touch executed")
NEW_META = META + b")\x81"

HOSTILE = {
    "a method of Path": sets(PATH, "glob", META),
    "a method of a class of torch": sets(META, "__getitem__", ENUM),
    "a class's dictionary": META + b"}" + text("__init__") + SIZE + b"sb",
    "the members of an enum": sets(ENUM, "_value2member_map_", b"}"),
    "what a function keeps": sets(LAYOUT, "cache", b"}"),
    "what a function does": sets(LAYOUT, "__code__", b"N"),
    "a type of torch": sets(DTYPE, "itemsize", b"K\x00"),
    "a size": sets(SIZE, "numel", META),
    "torch's module": sets(named("torch", "serialization"), "load", META),
    "a name with dots": text(MODULE) + text("StorageMeta.__init__") + b"\x93",
    "an attribute of a class": called(GETATTR, PATH, text("unlink")),
    "an attribute of a made object": called(GETATTR, called(PATH, text("x")), text("unlink")),
    "a command": called(named("os", "system"), RUN),
    "a builtin": called(named("builtins", "exec"), text("open('executed', 'w')")),
    "a command, of Python 2": called(named("__builtin__", "eval"), text("open('executed', 'w')")),
    "a command, as an old instance": b"(" + RUN + b"ios\nsystem\n",
    "a command, as an object": b"(" + named("os", "system") + RUN + b"o",
    "a command, as a new object": named("subprocess", "Popen") + RUN + b"\x85\x81",
    "a partial call": called(named("functools", "partial"), META),
    "what another unpickler allows": called(named("torch._utils", "_rebuild_tensor_v2")),
    "a persistent object": b"Px\n",
    "a registered extension": b"\x82\x01",
    "another class for an object": sets(NEW_META, "__class__", META),
    "an item of a class": META + text("x") + META + b"s",
    "an item appended to a class": META + META + b"a",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A good checkpoint."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "method": {"name": "x"}}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    return tmp_path / "step-1"


def world() -> list:
    """Everything that an index may name, with its attributes."""
    members = list(index_types._MEM_FORMAT_ENCODING)
    objects = [*checkpoint_folder._DATACLASSES, *members, *checkpoint_folder._NAMES.values()]
    objects += [torch.Size, torch.serialization, torch.serialization._get_layout, pathlib.Path, pathlib.PosixPath]
    return [(thing, dict(vars(thing))) for thing in [*objects, enum.Enum, os] if hasattr(thing, "__dict__")]


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_index_that_reaches_beyond_itself_is_refused(folder, kind):
    index, before = folder / ".metadata", world()
    good = index.read_bytes()
    assert CheckpointFolder(folder).shapes()["w"] == (3,)  # control
    index.write_bytes(good[:2] + HOSTILE[kind] + b"0" + good[2:])
    with pytest.raises(Damaged, match="not the index of a checkpoint") as raised:
        CheckpointFolder(folder)
    assert world() == before and not pathlib.Path("executed").exists()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "added",
    [
        sets(NEW_META, "modules", META),
        sets(sets(NEW_META, "__setstate__", META), "x", b"N"),
        sets(called(ENUM, b"K\x00"), "_value_", b"K\x01"),
        sets(called(GETATTR, ENUM, text("TORCH_CHANNELS_LAST")), "value", b"K\x00"),
        sets(called(PATH, text("x")), "_str", text("/")),
    ],
)
def test_what_an_index_does_to_its_own_objects_stays_there(folder, added):
    index, before = folder / ".metadata", world()
    good = index.read_bytes()
    index.write_bytes(good[:2] + added + b"0" + good[2:])
    try:
        CheckpointFolder(folder)
    except Damaged:
        pass
    assert world() == before
    index.write_bytes(good)
    assert Reader(folder).read_metadata() == pickle.loads(good)


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


ODD = {
    "no entries": lambda index: setattr(index, "state_dict_metadata", 5),
    "an entry of no kind": lambda index: index.state_dict_metadata.update(w=None),
    "a name that is none": lambda index: index.state_dict_metadata.update({5: index.state_dict_metadata["w"]}),
    "no shape": _of_tensor("size", None),
    "no type": _of_tensor("properties", None),
    "no piece of a tensor, which would be what is in memory": _of_tensor("chunks", []),
    "a shape that no file holds": _of_tensor("size", torch.Size([2**40])),
    "a shape and a piece that no file holds": lambda index: (
        _of_tensor("size", torch.Size([2**40]))(index),
        _of_tensor("chunks", [index_types.ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))])(index),
    ),
    "no places": lambda index: setattr(index, "storage_data", {}),
    "a place before the file": _of_file("offset", -5),
    "a place behind its end": _of_file("offset", 2**62),
    "no end": _of_file("length", None),
    "more than the file": _of_file("length", 2**40),
    "less than nothing": _of_file("length", -1),
    "no file": _of_file("relative_path", 5),
    "modules that are none": lambda index: setattr(index.storage_meta, "modules", 5),
}


@pytest.mark.parametrize("what", ODD)
def test_an_index_of_odd_values_is_damaged(folder, what):
    """This is checked before any data are read; torch's own reader checks none of it."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    ODD[what](index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(Damaged, match=r"\.metadata: |damaged, it does not hold"):
        CheckpointFolder(folder)


def test_bytes_of_a_file_count_once(folder):
    """With many overlapping places, a small file could stand for tensors that fill the memory."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    place, info = next((place, info) for place, info in index.storage_data.items() if place.offset is not None)
    for number in range(1, 1000):
        index.storage_data[index_types.MetadataIndex(place.fqn, torch.Size([number, number]))] = info
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(Damaged, match="damaged, it does not hold"):
        CheckpointFolder(folder)

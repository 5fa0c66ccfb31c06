"""`PCConfig` as a value: written and read, copied, compared, and from files of earlier versions."""

import copy
import json
import pickle
from dataclasses import asdict, replace

import pytest

from pc import PCConfig
from pc.maps import COEFFICIENTS
from pc.method import method_of

OWN = (1.49, -0.5)
# pickle.dumps(PCConfig(blocks=("o",)), 0) of an earlier version, whose PCConfig had an attribute `maps` and no `levels`
OF_EARLIER = (
    b"ccopy_reg\n_reconstructor\np0\n(cpc.config\nPCConfig\np1\nc__builtin__\nobject\np2\nNtp3\nRp4\n(dp5\nVlevel\np6\n"
    b"I4\nsVblocks\np7\n(Vo\np8\ntp9\nsVheads\np10\n(tsVsplits\np11\nNsVpower_iterations\np12\nI10\nsVnorm_recovery\n"
    b"p13\nI01\nsVlearnable_gamma\np14\nI01\nsVcompute_dtype\np15\nVfloat32\np16\nsVmaps\np17\n(dp18\ng8\n"
    b"(F3.625\nF-9.261\nF14.097\nF-10.351\nF2.89\ntp19\nssb."
)
CONFIGS = [PCConfig(level=level) for level in (4, "polar_express", OWN, {"o": OWN, "ffn": 1})]


@pytest.mark.parametrize(
    "again",
    [
        lambda config: PCConfig(**json.loads(json.dumps(asdict(config)))),
        lambda config: pickle.loads(pickle.dumps(config)),
        copy.deepcopy,
        replace,
    ],
    ids=["json", "pickle", "deepcopy", "replace"],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.level))
def test_a_config_stays_the_same(config, again):
    found = again(config)
    assert found == config and repr(found) == repr(config) and found.levels == config.levels
    assert method_of(found.for_block("o")) is method_of(config.for_block("o"))


@pytest.mark.parametrize(
    "given, level",
    [(4, 4), (4.0, 4), (list(COEFFICIENTS[2]), 2), ([1.49, -0.5], OWN), ({"o": 4.0, "ffn": OWN}, {"o": 4, "ffn": OWN})],
    ids=str,
)
def test_a_level_is_held_by_its_name(given, level):
    config = PCConfig(level=given)
    assert repr(config.level) == repr(level) and asdict(config)["level"] == level
    assert f"level={level!r}, blocks" in repr(config)
    changed = replace(config, level=1)  # the levels of the first are not taken over
    assert changed.only_level.map == COEFFICIENTS[1] and config.levels["o"].map != COEFFICIENTS[1]


def test_a_config_that_an_earlier_version_saved_is_used():
    """As within a whole model of torch.save(model)."""
    config = pickle.loads(OF_EARLIER)
    assert config == PCConfig(blocks=("o",)) and method_of(config).describe() == "level 4"
    assert config.for_block("o").only_level.map == COEFFICIENTS[4]

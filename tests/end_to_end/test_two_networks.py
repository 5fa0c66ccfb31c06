"""Two nodes of a run with networks of their own, joined by a cable, on which each node's name is its loopback address."""

import os
import subprocess
import sys

import pytest

from helpers.tiny import ROOT, write_small_config
from pc.common.run_folder import state_of

ADDRESSES = ["10.199.7.1", "10.199.7.2"]
IN_NETWORK = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def networks(tmp_path):
    """Two words-before-a-command, one per node."""
    names = [f"pc-{os.getpid()}-{node}" for node in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    else:
        commands = []
        for node, name in enumerate(names):
            hosts = tmp_path / f"hosts-{node}"
            lines = [f"127.0.1.1 node-{node}", f"{ADDRESSES[1 - node]} node-{1 - node}", "127.0.0.1 localhost"]
            hosts.write_text("\n".join(lines) + "\n")
            enter = ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", IN_NETWORK, "enter"]
            commands.append([*enter, str(hosts), f"node-{node}"])
        yield commands
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_each_node_finds_the_interface_that_reaches_the_other(networks):
    for network, peer in zip(networks, reversed(ADDRESSES), strict=True):
        words = [
            *network,
            sys.executable,
            "-c",
            f"from pc.launch import slurm as n; print(n.gloo_interface({peer!r}))",
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "{'GLOO_SOCKET_IFNAME': 'cable'}\n", done.stderr


@pytest.mark.soak
def test_nodes_whose_names_are_loopback_addresses_train_one_run(networks, tiny_shards, tmp_path):
    folder = tmp_path / "run"
    config = write_small_config(tmp_path / "small.toml", tiny_shards, steps=2, interval=2)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "node-0\nnode-1"\n')
    (tmp_path / "scontrol").chmod(0o755)
    overrides = [f"--job.dump_folder={folder}", "--training.local_batch_size=1", "--validation.local_batch_size=1"]
    nodes = []
    for node, network in enumerate(networks):
        environment = {
            **os.environ,
            "NGPU": "1",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_NNODES": "2",
            "SLURM_NODEID": str(node),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node-[0-1]",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1" if node == 0 else ADDRESSES[0],
        }
        words = [*network, sys.executable, "-m", "pc.launch.slurm", "task", str(config), *overrides]
        nodes.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    try:
        said = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert state_of(folder).state == "finished"
    assert "[rank0]:" in said[0] and "loss" in said[0] and "loss" not in said[1]

"""The environment variables of launchers."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_kv.ranks.environment import Launch, launched


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, None),
        ({"MLX_HOSTFILE": "hosts"}, None),
        (
            {"MLX_RANK": "1", "MLX_IBV_DEVICES": "f", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"},
            Launch("jaccl", "10.0.0.1"),
        ),
        ({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "5000"}, Launch("nccl", "10.0.0.1")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            Launch("mpi", None),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"},
            Launch("mpi", "127.0.0.1"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("mpi", None)),
    ],
)
def test_what_launchers_say(environment: dict[str, str], expected: Launch | None) -> None:
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("content", "leader"),
    [
        ('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]', "127.0.0.1"),
        ('[["10.0.0.1:5000", "10.0.1.1:5000"], ["10.0.0.2:5000"]]', "10.0.0.1"),
        ('[["[fe80::1]:5000"], ["[fe80::2]:5000"]]', "fe80::1"),
        ('[["127.0.0.1:5000"]]', None),
    ],
)
def test_the_first_host_of_a_ring_leads(content: str, leader: str | None, tmp_path: Any) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(content)
    expected = None if leader is None else Launch("ring", leader)
    assert launched({"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}) == expected


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "[[], []]"])
def test_files_of_hosts_that_are_none(content: str | None, tmp_path: Any) -> None:
    hosts = tmp_path / "hosts.json"
    if content is not None:
        hosts.write_text(content)
    with pytest.raises(ValueError, match=r"MLX_HOSTFILE .*hosts\.json"):
        launched({"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)})

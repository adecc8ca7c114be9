"""The environment variables that launchers of ranks set (`mlx.launch`, `mpirun`). MLX is not imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

LOOPBACK = "127.0.0.1"
SINGLE = ""  # address of the leader if there is one rank only: MLX's ring of one cannot connect to itself
BACKENDS = {  # by a variable that only this backend needs, in the order in which they are tried
    "MLX_HOSTFILE": "ring",
    "MLX_IBV_DEVICES": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "OMPI_COMM_WORLD_RANK": "mpi",
    "PMI_RANK": "mpi",
}
RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Number of ranks on this machine, and of all ranks, by MPI's launchers.
LOCAL_SIZES = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        backend: MLX's name for what connects the ranks.
        leader: the address at which other ranks reach rank 0; None if the environment does not contain it.
    """

    backend: str
    leader: str | None


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """How this process was started; None if it is the only one.

    Raises:
        ValueError: a file that a variable names cannot be read.
    """
    for name, backend in BACKENDS.items():
        if name in environment and ("MLX_RANK" in environment or backend == "mpi"):
            leader = _leader(backend, environment)
            return None if leader == SINGLE else Launch(backend, leader)
    return None


def follows(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a rank other than 0."""
    if launched(environment) is None:
        return False
    return next((environment[name] for name in RANKS if name in environment), "0") != "0"


def _leader(backend: str, environment: Mapping[str, str]) -> str | None:
    if backend == "ring":
        return _first_host(environment["MLX_HOSTFILE"])
    if backend == "jaccl":
        return _host(environment.get("MLX_JACCL_COORDINATOR", "")) or None
    if backend == "nccl":
        return environment["NCCL_HOST_IP"] or None
    one_machine = any(
        local in environment and environment[local] == environment.get(total) for local, total in LOCAL_SIZES
    )
    return LOOPBACK if one_machine else None


def _first_host(path: str) -> str | None:
    """The address of rank 0 in the host file of MLX's ring."""
    try:
        with open(path, encoding="utf-8") as file:
            hosts: Any = json.load(file)
        return SINGLE if len(hosts) == 1 else _host(str(hosts[0][0])) or None
    except OSError as error:
        raise ValueError(f"cannot read MLX_HOSTFILE {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f'MLX_HOSTFILE {path} is not a list such as [["10.0.0.1:5000"], ["10.0.0.2:5000"]]') from error


def _host(address: str) -> str:
    """An address without its port."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"

"""What ranks run in tests of the group itself."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time

import mlx.core as mx
from mlx_lm.generate import generation_stream

import mlx_kv
from mlx_kv.ranks import link


def total(what: str) -> None:
    """A number of each rank, added up: the ranks have found each other."""
    group = mx.distributed.init(strict=True, backend="ring")
    print(what, group.rank(), group.size(), mx.distributed.all_sum(mx.array(group.rank() + 1)).item())


def joined(**options: object) -> mlx_kv.RankGroup:
    """This rank's group; what is refused is one line."""
    try:
        group = mlx_kv.join_ranks("heads", **options)  # type: ignore[arg-type]
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr)
        sys.exit(2)
    assert group is not None
    return group


def talk() -> None:
    """Messages in both directions, and a good end."""
    group = joined()
    assert (group.leads, group.split) == (group.rank == 0, "heads")
    assert group.gathered({"rank": group.rank, "text": "é\n"}) == [
        {"rank": rank, "text": "é\n"} for rank in range(group.size)
    ]
    if group.leads:
        group.leader.tell("numbers", list(range(100_000)))
        assert group.leader.answers() == [[99_999, rank] for rank in range(1, group.size)]
        print("frames", group.leader.frames)
    else:
        word, numbers = group.follower.next() or ()
        assert word == "numbers"
        group.follower.answer([numbers[-1], group.rank])
        assert group.follower.next() is None
    group.close()
    print("over")


def otherwise(which: str) -> None:
    """Ranks that were not started alike: the second has something else."""
    other = os.environ["MLX_RANK"] == "1"
    if which == "version" and other:
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.9" if name == "mlx-kv" else version(name)  # type: ignore[assignment]
    joined(secret="other" if which == "secret" and other else "same", join_seconds=10)


def nowhere(address: str) -> None:
    joined(address=address or None)


def idle(how: str) -> None:
    """Waits for what the leader says, or for a collective that never ends, until a rank dies."""
    with joined() as group, mx.stream(generation_stream):
        print("ready", file=sys.stderr)
        if how == "idle" or (how == "behind" and group.rank == 1):
            time.sleep(600) if group.leads or how == "behind" else group.follower.next()
        while True:  # busy, or in a collective for which rank 1 never comes
            mx.eval(mx.distributed.all_sum(mx.ones(4), group=group.raw))


def called() -> None:
    """The leader hears that a rank is gone by a callback of its own, and can say so before it leaves."""
    group = joined()
    if not group.leads:
        print("ready", file=sys.stderr)
        group.follower.next()
        return
    heard: list[str] = []
    group.when_gone(heard.append)
    print("ready", file=sys.stderr)
    try:
        group.leader.answers()
    except link.RanksError as error:
        print(f"heard {error}", file=sys.stderr)
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    print(f"called {heard}", file=sys.stderr)
    link.leave("bye")


def hangs() -> None:
    """A step that never ends: rank 1 does not take part in it."""
    group = joined(step_seconds=1.0)
    if group.leads:
        with group.watch(), mx.stream(generation_stream):
            mx.eval(mx.distributed.all_sum(mx.ones(4), group=group.raw))
    time.sleep(600)


def fails(where: str, how: str) -> None:
    """One rank raises while the others wait."""
    with joined() as group:
        if group.rank == int(where):
            raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[how]("no such model")
        group.follower.next() if not group.leads else group.leader.answers()


def leaves() -> None:
    """A script that ends without closing its group."""
    group = joined()
    group.gathered(group.rank)
    if group.rank == 1:
        time.sleep(0.3)
    print("done")


def late() -> None:
    """Rank 1 never comes to join."""
    if os.environ["MLX_RANK"] == "0":
        joined(join_seconds=1.0)


def loads() -> None:
    """A server whose ranks load their parts for long."""
    from mlx_kv.cli.main import main
    from mlx_kv.ranks import splitting

    def load_part(*arguments: object) -> None:
        print("loading", file=sys.__stderr__, flush=True)
        time.sleep(600)

    splitting.load_part = load_part  # type: ignore[assignment]
    sys.argv = ["mlx-kv", "serve", "--port", "0"]
    main()

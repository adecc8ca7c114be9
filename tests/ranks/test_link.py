"""What the leader tells and the others answer, over real sockets, in threads of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from mlx_kv.ranks import channel, group, joining, link
from mlx_kv.ranks.channel import Channel, Reception, connect, framed
from mlx_kv.ranks.environment import Launch, launched
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.joining import received
from mlx_kv.ranks.link import EXIT_CODE, Follower, Leader, RanksError
from mlx_kv.ranks.watchdog import Watchdog


class Rank:
    """All that a group asks of MLX's, where there are no collectives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


@contextlib.contextmanager
def linked(size: int = 2, gone: Callable[[str], None] | None = None) -> Iterator[list[RankGroup]]:
    """Groups of all ranks, in this process; a broken one only says so."""
    gone = gone or (lambda reason: None)
    pairs = [socket.socketpair() for _ in range(1, size)]
    leader = Leader({rank: Channel(here) for rank, (here, _) in enumerate(pairs, 1)}, gone)
    links = [leader, *(Follower(Channel(there), gone) for _, there in pairs)]
    groups = [RankGroup(Rank(rank, size), "heads", each, 1.0) for rank, each in enumerate(links)]  # type: ignore[arg-type]
    try:
        yield groups
    finally:
        for each in reversed(links):
            each.close(1, "over")


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "GRACE", 0.05)


def everywhere(groups: list[RankGroup], what: Callable[[RankGroup], Any]) -> list[Any]:
    """What all ranks get of a call, or raise."""

    def caught(group: RankGroup) -> Any:
        try:
            return what(group)
        except (ValueError, RanksError) as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(caught, groups))


# --- messages -----------------------------------------------------------------------------------------------------


def test_each_rank_gets_what_all_have() -> None:
    with linked(3) as groups:
        found = everywhere(groups, lambda group: group.gathered({"rank": group.rank, "text": "é\n"}))
    assert found == [[{"rank": rank, "text": "é\n"} for rank in range(3)]] * 3


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"model": "tiny"}, None),
        ({"model": "large"}, "rank 2 has another model than rank 0 (large, not tiny): start all ranks alike"),
        (
            {"model": "tiny", "KV_bits": 8},
            "rank 2 has another KV bits than rank 0 (8, not none): start all ranks alike",
        ),
        ({}, "rank 2 has another model than rank 0 (none, not tiny): start all ranks alike"),
    ],
)
def test_what_differs_is_refused_in_the_same_words(others: dict[str, Any], line: str | None) -> None:
    with linked(3) as groups:
        found = everywhere(groups, lambda group: group.compare(**(others if group.rank == 2 else {"model": "tiny"})))
    assert [None if each is None else str(each) for each in found] == [line] * 3


def test_what_a_destructor_tells_in_the_middle_of_a_message_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked() as (leader, follower):
        write, told = Channel.write, []

        def interrupted(self: Channel, data: bytes) -> None:
            if not told:
                told.append(True)
                leader.leader.tell("dropped")
            write(self, data)

        monkeypatch.setattr(Channel, "write", interrupted)
        leader.leader.tell("numbers", [1, 2])
        assert [follower.follower.next(), follower.follower.next()] == [["numbers", [1, 2]], ["dropped"]]


def test_many_threads_tell_at_once() -> None:
    with linked() as (leader, follower):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: leader.leader.tell(n), range(800)))
        assert sorted(follower.follower.next()[0] for _ in range(800)) == list(range(800))  # type: ignore[index]
        with pytest.raises(TypeError):
            leader.leader.tell(object())
        assert leader.leader.bytes_sent > 800 * 5


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_good_end_is_none() -> None:
    heard: list[str] = []
    with linked(3, heard.append) as groups:

        def ends(group: RankGroup) -> Any:
            message = None if group.leads else group.follower.next()
            group.close()
            return message

        began = time.monotonic()
        assert everywhere(groups, ends) == [None] * 3
        assert time.monotonic() - began < 2
        assert heard == []
        with pytest.raises(RanksError, match="has been closed"):
            groups[0].leader.tell("more")
        with pytest.raises(RanksError, match="has been closed"):
            groups[1].follower.answer("more")


@pytest.mark.parametrize(
    ("who", "how", "reason"),
    [
        (2, lambda group: group.close(2, "no such model"), "rank 2 has ended: no such model"),
        (0, lambda group: group.close(2, "no such model"), "the leader has ended: no such model"),
        (2, lambda group: group.fail("out of step"), "rank 2 has ended: rank 2: out of step"),
        (0, lambda group: group.fail("out of step"), "rank 0: out of step"),
    ],
)
def test_everybody_hears_the_reason_once(who: int, how: Callable[[RankGroup], None], reason: str) -> None:
    heard: list[str] = []
    with linked(3, heard.append) as groups:
        how(groups[who])
        for group in groups:
            if group.rank != who:
                with pytest.raises(RanksError, match=reason):
                    group.leader.answers() if group.leads else group.follower.next()
        time.sleep(0.1)
    assert [each for each in heard if each == reason] == [reason] * 2 + [reason] * (reason == "rank 0: out of step")


def test_a_rank_that_has_left_in_peace_is_missed_when_it_is_asked() -> None:
    heard: list[str] = []
    with linked(3, heard.append) as groups:
        closing = threading.Thread(target=groups[1].close)
        closing.start()
        with pytest.raises(RanksError, match="rank 1 has ended before the leader"):
            groups[0].leader.answers()
        with pytest.raises(RanksError, match="rank 1 has ended before the leader"):
            groups[0].leader.tell("more")
        with pytest.raises(RanksError, match="rank 1 has ended before the leader"):
            groups[2].follower.next()
        closing.join(5)
        assert not closing.is_alive()


def test_an_end_on_purpose_ends_all_at_once_and_is_no_error() -> None:
    """It does not wait for what others are at, such as a model that they load."""
    heard: list[str] = []
    with linked(3, heard.append) as groups:
        began = time.monotonic()
        groups[0].close(0, "stopped")
        assert time.monotonic() - began < 2
        for group in groups[1:]:
            with pytest.raises(RanksError, match="the leader has ended: stopped"):
                group.follower.next()
            assert group.link._code == 0
        time.sleep(0.1)
        assert heard == ["the leader has ended: stopped"] * 2


def test_whoever_calls_sys_exit_ends_in_peace() -> None:
    heard: list[str] = []
    with linked(2, heard.append) as (leader, follower):
        closing = threading.Thread(target=lambda: (follower.follower.next(), follower.close()))
        closing.start()
        with pytest.raises(SystemExit), leader:
            raise SystemExit(0)
        closing.join(5)
        assert heard == []


def test_who_asks_later_is_called_at_once() -> None:
    with linked() as (leader, follower):
        follower.close(EXIT_CODE, "no more memory")
        with pytest.raises(RanksError):
            leader.leader.answers()
        heard: list[str] = []
        leader.when_gone(heard.append)
        assert heard == ["rank 1 has ended: no more memory"]


# --- who comes in -------------------------------------------------------------------------------------------------


def test_strangers_do_not_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that speaks of something else, one that leaves; a rank comes in past them."""
    monkeypatch.setattr(channel, "HELLO_WITHIN", 0.5)
    reception = Reception("127.0.0.1", b"key")
    address = ("127.0.0.1", reception.port)
    with socket.create_connection(address), socket.create_connection(address) as speaks:
        speaks.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        socket.create_connection(address).close()
        with pytest.raises(TimeoutError):
            reception.next(0.1)
        came = connect(address, b"key")
        came.write(framed({"rank": 1}))
        (other, said) = reception.next(5)
        assert said == {"rank": 1}
        other.write(framed(["tell", 1]))
        assert came.read() == ["tell", 1]
    with pytest.raises(AuthenticationError):
        connect(address, b"another")
    with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"):
        reception.next(5)
    reception.close()
    with pytest.raises(OSError):  # noqa: PT011, whatever the system says
        connect(address, b"key")


@pytest.mark.parametrize(("keys", "line"), [([b"key", b"other"], "has another secret"), ([b"key"], "has not come")])
def test_who_has_come_hears_that_another_has_not(keys: list[bytes], line: str) -> None:
    reception = Reception("127.0.0.1", b"key")
    heard: list[str] = []

    def come(rank: int, key: bytes) -> None:
        with contextlib.suppress(AuthenticationError):
            came = connect(("127.0.0.1", reception.port), key)
            came.write(framed({"rank": rank}))
            with pytest.raises(RanksError):
                Follower(came, heard.append).next()

    threads = [threading.Thread(target=come, args=item, daemon=True) for item in enumerate(keys, 1)]
    for thread in threads:
        thread.start()
    with pytest.raises(ValueError, match=f"rank 2 {line}"):
        received(reception, 3, 0.5, None)
    for thread in threads:
        thread.join(5)
    assert len(heard) == 1
    assert heard[0].startswith(f"the leader has ended: rank 2 {line}")


def test_a_stranger_with_another_secret_is_no_rank() -> None:
    reception = Reception("127.0.0.1", b"key")
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", reception.port), b"guessed")

    def come() -> None:
        time.sleep(0.2)
        came.append(connect(("127.0.0.1", reception.port), b"key"))
        came[0].write(framed({"rank": 1}))

    came: list[Channel] = []
    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    leader = received(reception, 2, 10, lambda reason: None)
    thread.join(5)
    leader.tell("hello")
    assert came[0].read() == ["tell", "hello"]
    leader.close(1, "over")


def test_a_rank_that_has_met_the_others_and_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What would end this process if MLX waited for good is over by then, however long MLX took."""
    monkeypatch.setattr(joining, "_GUARD", joining._GUARD.replace("os.kill(os.getppid(), signal.SIGKILL)", "pass"))
    monkeypatch.setattr(group, "launched", lambda: Launch("ring", "127.0.0.1"))
    monkeypatch.setattr(group, "connected", lambda launch: time.sleep(0.3) or Rank(0, 2))
    monkeypatch.setattr(joining, "_told_by_first", lambda raw, told: json.loads(told))
    with pytest.raises(ValueError, match="rank 1 has not come within 1 s: start all ranks again"):
        group.join_ranks(join_seconds=1.0)
    assert capfd.readouterr().err == ""


# --- the environment ----------------------------------------------------------------------------------------------


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


# --- the watchdog -------------------------------------------------------------------------------------------------


def test_a_step_may_take_as_long_as_those_before_it_and_more() -> None:
    late: list[str] = []
    watchdog = Watchdog(late.append, 0.2)
    with watchdog.watch("step"), watchdog.watch("inner"):
        time.sleep(0.05)
    assert watchdog.limit("step") > 0.9  # twenty times as long
    assert watchdog.limit("inner") == 0.2  # it was part of the other
    with watchdog.watch("step"):
        time.sleep(0.3)
    with watchdog.watch("prompt"):
        for _ in range(3):  # chunks
            time.sleep(0.12)
            watchdog.progress()
    watchdog.progress()  # of nothing
    assert late == []
    with watchdog.watch("other"):
        time.sleep(0.6)
    assert len(late) == 1
    assert late[0].startswith("other has taken 0 s")

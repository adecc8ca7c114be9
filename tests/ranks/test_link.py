"""What the leader tells and the others answer, over real sockets, in threads of this process."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from mlx_kv.ranks import group, link
from mlx_kv.ranks.environment import Launch
from mlx_kv.ranks.group import RankGroup, receive_ranks
from mlx_kv.ranks.link import EXIT_CODE, Channel, Follower, Leader, RanksError, Reception, connect, encode


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
        (2, lambda group: group.fail("out of step"), "rank 2: out of step"),
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
    assert [each for each in heard if each == reason] == [reason] * (3 if "out of step" in reason else 2)


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


# --- connections --------------------------------------------------------------------------------------------------


def test_strangers_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent one, one that uses another protocol, one that disconnects; a rank is accepted meanwhile."""
    monkeypatch.setattr(link, "HELLO_SECONDS", 0.5)
    reception = Reception("127.0.0.1", b"key")
    address = ("127.0.0.1", reception.port)
    with socket.create_connection(address), socket.create_connection(address) as other_protocol:
        other_protocol.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        socket.create_connection(address).close()
        with pytest.raises(TimeoutError):
            reception.next(0.1)
        follower = connect(address, b"key", 1)
        rank, leader = reception.next(5)
        assert rank == 1
        leader.write(encode(["tell", 1]))
        assert follower.read() == ["tell", 1]
    with pytest.raises(AuthenticationError):
        connect(address, b"another", 1)
    with pytest.raises(AuthenticationError):
        reception.next(5)
    reception.close()
    with pytest.raises(OSError):  # noqa: PT011, the message is the system's
        connect(address, b"key", 1)


@pytest.mark.parametrize("hello", [b"null", b'{"rank": 1}', b"[1]", b"x", b"1" * 65, b"9" * 2**20])
def test_a_hello_that_is_no_number_of_a_rank_does_no_harm(
    hello: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a long one, which is not read, of a side that has the key."""
    monkeypatch.setattr(link, "encode", lambda rank: hello)
    with contextlib.closing(Reception("127.0.0.1", b"key")) as reception:
        address = ("127.0.0.1", reception.port)
        # A long hello may still be on its way when the other side disconnects: then connect itself fails.
        with pytest.raises(OSError):  # noqa: PT011, PT012, the message is the system's
            strange = connect(address, b"key", 1)
            strange.set_timeout(5)
            strange.read()
        monkeypatch.undo()
        rank = connect(address, b"key", 1)
        assert reception.next(5)[0] == 1
        rank.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("keys", "line"), [([b"key", b"other"], "has another secret"), ([b"key"], "has not come")])
def test_ranks_that_have_connected_end_when_another_one_has_not(keys: list[bytes], line: str) -> None:
    reception = Reception("127.0.0.1", b"key")
    reasons: list[str] = []

    def join(rank: int, key: bytes) -> None:
        with contextlib.suppress(AuthenticationError):
            follower = Follower(connect(("127.0.0.1", reception.port), key, rank), reasons.append)
            with pytest.raises(RanksError):
                follower.next()

    threads = [threading.Thread(target=join, args=item, daemon=True) for item in enumerate(keys, 1)]
    for thread in threads:
        thread.start()
    with pytest.raises(ValueError, match=f"rank 2 {line}"):
        receive_ranks(reception, 3, 0.5, None)
    for thread in threads:
        thread.join(5)
    assert len(reasons) == 1
    assert reasons[0].startswith(f"the leader has ended: rank 2 {line}")


def test_a_stranger_with_another_secret_is_no_rank() -> None:
    reception = Reception("127.0.0.1", b"key")
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", reception.port), b"guessed", 1)

    def join() -> None:
        time.sleep(0.2)
        joined.append(connect(("127.0.0.1", reception.port), b"key", 1))

    joined: list[Channel] = []
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    leader = receive_ranks(reception, 2, 10, lambda reason: None)
    thread.join(5)
    leader.tell("hello")
    assert joined[0].read() == ["tell", "hello"]
    leader.close(1, "over")


@pytest.mark.parametrize("data", [b"no JSON", b"{}", b"[]", b"7", b'["bye"]', b'["broken", 1, 2, 3]'])
@pytest.mark.parametrize("leads", [False, True])
def test_what_is_no_message_breaks_the_group(data: bytes, leads: bool) -> None:
    here, there = socket.socketpair()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    link = Leader({1: Channel(here)}, reasons.put) if leads else Follower(Channel(here), reasons.put)
    Channel(there).write(data)
    who = "rank 1" if leads else "the leader"
    problem = "is gone" if data == b"no JSON" else "sent what is no message"
    assert reasons.get(timeout=5).startswith(f"{who} {problem}")
    there.close()
    link.close(1, "over")


def test_a_rank_that_has_met_the_others_and_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What would end this process if MLX waited for good is over by then, however long MLX took."""
    monkeypatch.setattr(group, "_GUARD", group._GUARD.replace("os.kill(os.getppid(), signal.SIGKILL)", "pass"))
    monkeypatch.setattr(group, "launched", lambda: Launch("ring", "127.0.0.1"))
    monkeypatch.setattr(group, "connect_ranks", lambda launch: time.sleep(0.3) or Rank(0, 2))
    monkeypatch.setattr(group, "_from_leader", lambda raw, announcement: json.loads(announcement))
    with pytest.raises(ValueError, match="rank 1 has not come within 1 s: start all ranks again"):
        group.join_ranks(join_seconds=1.0)
    assert capfd.readouterr().err == ""

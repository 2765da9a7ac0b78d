"""The processes' meeting and watch, over real sockets, in threads of one process."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support import program

from tlt_jax.config import ConfigError
from tlt_jax.parallel import peers as room
from tlt_jax.parallel.peers import LOST, Alone, Peers, meet, split_address


@pytest.fixture
def port() -> int:
    return program.free_ports()


def together(port: int, processes: int, tokens: str | None = None) -> list[Peers]:
    """All processes of a company, in this one."""
    with ThreadPoolExecutor(processes) as pool:
        parts = [
            pool.submit(meet, f"127.0.0.1:{port}", processes, i, tokens[i] if tokens else "same", 5.0)
            for i in range(processes)
        ]
        return [part.result() for part in parts]


def agreed(company: list[Peers], what: str, values: list) -> list[list]:
    with ThreadPoolExecutor(len(company)) as pool:
        return list(pool.map(lambda pair: pair[0].agree(what, pair[1]), zip(company, values, strict=True)))


def losses(company: list[Peers]) -> list[list[tuple[str, int]]]:
    """From now on losses are noted here, not ended by."""
    noted: list[list[tuple[str, int]]] = [[] for _ in company]
    for peers, notes in zip(company, noted, strict=True):
        peers.on_loss = lambda text, code, notes=notes: notes.append((text, code))
    return noted


def wait_until(ready) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_everybody_gets_everybodys_values_in_order_and_parts_in_peace(port):
    company = together(port, 3)
    noted = losses(company)
    for round_ in range(3):
        values = [{"process": i, "round": round_, "text": "größe\n"} for i in range(3)]
        assert agreed(company, f"round {round_}", values) == [values] * 3
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Peers.close, company))
    assert noted == [[], [], []]
    assert Alone().agree("alone", 3) == [3]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_who_ends_without_a_goodbye_is_named_everywhere(port, victim):
    company = together(port, 3)
    noted = losses(company)
    # As of a process that is gone: it watches no more, and says nothing.
    company[victim]._closing.set()
    company[victim]._watch.join()
    for peer in company[victim].peers:
        peer.link.shutdown(socket.SHUT_RDWR)
    others = [notes for i, notes in enumerate(noted) if i != victim]
    wait_until(lambda: all(others))
    for ((text, code),) in others:
        assert f"process {victim} on" in text and "ended before the run did" in text
        assert code == LOST


def test_who_falls_silent_is_lost(port, monkeypatch):
    monkeypatch.setattr(room, "SILENCE_SECONDS", 1.5)
    company = together(port, 2)
    noted = losses(company)
    company[1]._closing.set()  # its watch ends: no more beats, though the connection stands
    wait_until(lambda: noted[0])
    assert "process 1 on" in noted[0][0][0] and "has not been heard of" in noted[0][0][0]


def test_who_fails_says_why_and_how_the_others_should_end(port):
    company = together(port, 3)
    noted = losses(company)
    company[2].fail("`data`: it cannot be read", 2)
    wait_until(lambda: noted[0] and noted[1])
    for notes in noted[:2]:
        assert notes == [(notes[0][0], 2)]
        assert "process 2 on" in notes[0][0] and "`data`: it cannot be read" in notes[0][0]


def test_those_started_with_something_else_are_refused(port):
    with pytest.raises(ConfigError, match="was started with another config"):
        together(port, 2, tokens="ab")


def test_the_same_process_twice_is_refused(port):
    with ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(meet, f"127.0.0.1:{port}", 3, i, "same", 3.0) for i in (0, 1, 1)]
        faults = [part.exception() for part in parts]
    assert "process 2 did not come within 3 s" in str(faults[0])
    assert any("process 1 of 3 is there already" in str(fault) for fault in faults[1:])


def test_strangers_at_the_door_are_passed_over(port):
    with ThreadPoolExecutor(2) as pool:
        main = pool.submit(meet, f"127.0.0.1:{port}", 2, 0, "same", 10.0)
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\xfe\n", b""):
            wait_until(lambda: can_connect(port + 1))
            with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
                stranger.sendall(greeting)
        other = pool.submit(meet, f"127.0.0.1:{port}", 2, 1, "same", 10.0)
        company = [main.result(), other.result()]
    assert agreed(company, "here", [1, 2]) == [[1, 2]] * 2
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Peers.close, company))


def test_strangers_who_say_nothing_do_not_hold_the_others_up(port):
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        main = pool.submit(meet, f"127.0.0.1:{port}", 2, 0, "same", 10.0)
        for _ in range(6):
            wait_until(lambda: can_connect(port + 1))
            strangers.enter_context(socket.create_connection(("127.0.0.1", port + 1)))
        begun = time.monotonic()
        other = pool.submit(meet, f"127.0.0.1:{port}", 2, 1, "same", 10.0)
        company = [main.result(), other.result()]
        assert time.monotonic() - begun < 3.0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Peers.close, company))


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_stranger_in_the_place_of_process_0_is_noticed(port):
    with socket.create_server(("127.0.0.1", port + 1)) as server:

        def answer():
            link, _ = server.accept()
            link.sendall(b"220 mail\r\n")
            link.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="is not of this run"):
            meet(f"127.0.0.1:{port}", 2, 1, "same", 2.0)
        thread.join()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65535", "host:x", "host:-1"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ConfigError, match=r"`device.coordinator` is .*expected host:port"):
        split_address(address)
    assert split_address("node-0.local:1234") == ("node-0.local", 1234)
    assert split_address("[::1]:80") == ("::1", 80)

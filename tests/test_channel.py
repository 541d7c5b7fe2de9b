"""What goes in comes out; what is not a message is refused before memory is taken for it."""

from __future__ import annotations

import itertools
import socket

import msgpack
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from runtime.channel import Bell, Connection, Listener, check_endpoint, decode, encode, parse, references
from runtime.errors import ProtocolError, Refused
from runtime.message import ITEM_BYTES, MAX_HEADER_BYTES
from runtime.pool import Mappings
from runtime.protocol import (
    Conditioning,
    Decode,
    EncodeText,
    Hello,
    Sample,
    Status,
    request_from,
)
from runtime.settings import ModelSettings, SampleSettings

MODEL = ModelSettings(model="m")


def received(frames):
    """What the other side's socket gives."""
    return [zmq.Frame(bytes(frame)) for frame in frames]


def there_and_back(message):
    frames = received(encode(message)[0])
    return decode(parse(frames, request_from), frames, mappings=Mappings(None), give_back=False)


def sample(latent):
    conditioning = (Conditioning(embedding=torch.randn(1, 3, 4), pooled=torch.randn(1, 4), guidance=3.5),)
    settings = SampleSettings(seed=0xFFFFFFFFFFFFFFFF)
    return Sample(job="j", model=MODEL, settings=settings, positive=conditioning, latent=latent, batch_index=(0, 7))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(2, 3, 5), (7,), (), (0, 4), (1, 2, 3, 1, 2, 3, 1, 2)])
def test_a_tensor_arrives_as_it_was(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(getattr(torch, dtype))
    latent = there_and_back(Decode(job="j", model=MODEL, latent=tensor)).latent
    assert latent.dtype == tensor.dtype and latent.shape == tensor.shape and torch.equal(latent, tensor)


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[::2], lambda t: t[:, 1:3], lambda t: t.expand(3, 4, 6)])
def test_a_tensor_that_is_not_contiguous_arrives_as_it_was(view):
    tensor = view(torch.arange(24.0).view(4, 6))
    assert torch.equal(there_and_back(Decode(job="j", model=MODEL, latent=tensor)).latent, tensor)


def test_every_field_arrives():
    request = sample(torch.randn(2, 4, 1, 3, 3))
    back = there_and_back(request)
    assert back.settings == request.settings and back.batch_index == (0, 7)
    assert torch.equal(back.positive[0].pooled, request.positive[0].pooled)
    assert back.positive[0].attention_mask is None and back.positive[0].guidance == 3.5


def test_sending_copies_no_tensor():
    tensor = torch.zeros(1000)
    frames, _ = encode(Decode(job="j", model=MODEL, latent=tensor))
    tensor[3] = 1.0
    assert torch.frombuffer(frames[1], dtype=torch.float32)[3] == 1.0


def test_what_is_passed_on_keeps_references_and_makes_no_tensor():
    message = parse(received(encode(sample(torch.zeros(3)))[0]), request_from)
    assert [ref.frame for ref in references(message)] == [1, 2, 3]


def test_a_header_that_is_too_long_is_not_sent():
    many = tuple(range(65536)) * 8
    request = sample(torch.zeros(1)).model_copy(update={"batch_index": many})
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(request)


GOOD = encode(sample(torch.zeros(2, 3)))[0]
HEADER = msgpack.unpackb(GOOD[0])


def with_header(**changed):
    return [msgpack.packb({**HEADER, **changed}), *GOOD[1:]]


LATENT = HEADER["latent"]
BAD = {
    "empty": ([b""], ""),
    "garbage": ([b"\xff\x00garbage"], ""),
    "half a header": ([GOOD[0][:-9], *GOOD[1:]], ""),
    "something after the header": ([GOOD[0] + b"x", *GOOD[1:]], ""),
    "a list": ([msgpack.packb([1, 2])], ""),
    "numbers for names": ([msgpack.packb({1: 2})], ""),
    "a long header": ([b"\x00" * (MAX_HEADER_BYTES + 1)], ""),
    "a huge array that is not there": ([b"\x81\xa1v\xdd\xff\xff\xff\xff"], ""),
    "arrays in arrays": ([b"\x81\xa1v" + b"\xdd\x00\x00\xff\xff" * 5000], ""),
    "bytes": ([msgpack.packb({**HEADER, "job": b"raw"})], ""),
    "an extension type": ([msgpack.packb({**HEADER, "job": msgpack.ExtType(4, b"x")})], ""),
    "no version": ([msgpack.packb({k: v for k, v in HEADER.items() if k != "v"}), *GOOD[1:]], "j"),
    "another version": (with_header(v=2), "j"),
    "an unknown kind": (with_header(kind="dream"), "j"),
    "an unknown field": (with_header(colour="red"), "j"),
    "a missing frame": (GOOD[:-1], "j"),
    "an extra frame": ([*GOOD, b"more"], "j"),
    "a short frame": ([*GOOD[:-1], GOOD[-1][:-1]], "j"),
    "a long frame": ([*GOOD[:-1], bytes(GOOD[-1]) + b"x"], "j"),
    "a wrong dtype": (with_header(latent={**LATENT, "dtype": "float64"}), "j"),
    "a dtype that is none": (with_header(latent={**LATENT, "dtype": "load"}), "j"),
    "a wrong shape": (with_header(latent={**LATENT, "shape": [3, 3]}), "j"),
    "a frame used twice": (with_header(latent={**LATENT, "frame": 1}), "j"),
    "a frame that is not there": (with_header(latent={**LATENT, "frame": 9}), "j"),
    "a segment with a path": (with_header(latent={**LATENT, "frame": None, "segment": "../x"}), "j"),
    "a job that is none": (with_header(job="no/job", colour="red"), ""),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_a_message_is_refused_and_names_its_job_where_it_can(case):
    frames, job = BAD[case]
    with pytest.raises(ProtocolError) as caught:
        parse(received(frames), request_from)
    assert caught.value.job == job


def test_a_refusal_does_not_repeat_a_prompt():
    frames, _ = encode(EncodeText(job="j", model=MODEL, text="a secret garden"))
    header = {**msgpack.unpackb(frames[0]), "text": ["a secret garden"], "colour": "secret"}
    with pytest.raises(ProtocolError) as caught:
        parse(received([msgpack.packb(header)]), request_from)
    assert "secret" not in str(caught.value)


@effort(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_no_bytes_do_more_than_be_refused(frames):
    with pytest.raises(ProtocolError):
        parse(received(frames), request_from)


@effort(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD[0]) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(place, value):
    header = bytearray(GOOD[0])
    header[place] = value
    frames = received([bytes(header), *GOOD[1:]])
    try:
        message = parse(frames, request_from)
    except ProtocolError:
        return
    decode(message, frames, mappings=Mappings(None), give_back=False)


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.mark.parametrize("endpoint", ["ipc://{folder}/socket", "tcp://127.0.0.1:*"])
def test_messages_cross_a_socket_both_ways(context, tmp_path, endpoint):
    listener = Listener(context, endpoint.format(folder=tmp_path))
    connection = Connection(context, listener.endpoint)
    latents = [torch.full((size,), float(size)) for size in (1, 1000, 3_000_000)]
    for latent in latents:
        connection.send(encode(Decode(job="j", model=MODEL, latent=latent))[0])
    for latent in latents:
        peer, frames = listener.receive()
        request = decode(parse(frames, request_from), frames, mappings=Mappings(None), give_back=False)
        assert torch.equal(request.latent, latent)
        assert listener.send(peer, frames)
        assert len(connection.receive(seconds=5)) == 2
    assert connection.receive(seconds=0) is None
    for end in (connection, listener):
        end.close()


def test_a_peer_that_is_gone_is_told_of(context, tmp_path):
    listener = Listener(context, f"ipc://{tmp_path}/socket")
    assert not listener.send(b"nobody", encode(Status())[0])
    listener.close()


def test_a_bell_wakes_its_loop_from_any_thread(context):
    import threading

    bell = Bell(context)
    for number in range(3):
        threading.Thread(target=bell.ring, args=(str(number),)).start()
    assert {bell.answer() for _ in range(3)} == {"0", "1", "2"}
    bell.close()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("tcp://0.0.0.0:5555", "no authentication"),
        ("tcp://*:5555", "no authentication"),
        ("tcp://192.168.0.7:5555", "no authentication"),
        ("tcp://example.org:5555", "no authentication"),
        ("tcp://127.0.0.1.example.org:5555", "no authentication"),
        ("udp://127.0.0.1:5555", "neither ipc"),
        ("/tmp/socket", "neither ipc"),
        ("ipc://", "neither ipc"),
        ("ipc:///nowhere/socket", "not a folder that can be written to"),
        ("ipc:///proc/socket", "cannot"),
        ("ipc:///tmp/" + "x" * 120, "over 107 bytes"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_with_the_reason(context, endpoint, said):
    with pytest.raises(Refused, match=said):
        Listener(context, endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://localhost:5555", "tcp://[::1]:5555"])
def test_loopback_is_allowed(endpoint):
    check_endpoint(endpoint)


def test_a_socket_in_use_is_refused_and_stays_with_its_owner(context, tmp_path):
    owner = Listener(context, f"ipc://{tmp_path}/socket")
    with pytest.raises(Refused, match="in use by another process"):
        Listener(context, f"ipc://{tmp_path}/socket")
    connection = Connection(context, owner.endpoint)
    connection.send(encode(Hello())[0])
    assert parse(owner.receive()[1], request_from) == Hello()
    connection.close(), owner.close()


def test_a_port_in_use_is_refused(context):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"{port}.*another --endpoint"):
            Listener(context, f"tcp://127.0.0.1:{port}")


def test_a_socket_left_behind_is_taken_over(context, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "socket"))
    Listener(context, f"ipc://{tmp_path}/socket").close()


def test_a_file_in_the_way_is_left_alone(context, tmp_path):
    (tmp_path / "socket").write_text("mine")
    with pytest.raises(Refused, match="not a socket"):
        Listener(context, f"ipc://{tmp_path}/socket")
    assert (tmp_path / "socket").read_text() == "mine"


def test_a_socket_is_for_its_owner_alone(context, tmp_path):
    listener = Listener(context, f"ipc://{tmp_path}/socket")
    assert (tmp_path / "socket").stat().st_mode & 0o077 == 0
    listener.close()


def test_frames_are_taken_whole_in_any_order_of_sizes(context, tmp_path):
    listener = Listener(context, f"ipc://{tmp_path}/socket")
    connection = Connection(context, listener.endpoint)
    for sizes in itertools.permutations((0, 10, 100_000)):
        conditioning = tuple(Conditioning(embedding=torch.ones(size)) for size in sizes)
        message = sample(torch.zeros(1)).model_copy(update={"positive": conditioning})
        connection.send(encode(message)[0])
        _, frames = listener.receive()
        back = decode(parse(frames, request_from), frames, mappings=Mappings(None), give_back=False)
        assert [item.embedding.numel() for item in back.positive] == list(sizes)
    connection.close(), listener.close()

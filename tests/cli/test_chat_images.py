"""`/image FILE` in `mlx-kv chat`: what is asked of images, taken back, refused, and known of earlier turns."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason='pip install ".[vision]"')

import vision_models as tiny
from PIL import Image as Pillow

from mlx_kv import generate, load

Called = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model("qwen3_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.png", tmp_path / "an other.png"]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 60, 3), np.uint8)
        Pillow.fromarray(pixels).save(path)
    return paths


@pytest.fixture
def chat(command: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Called]:
    def run(*lines: str, model: str = str(folder), options: tuple[str, ...] = ()) -> Called:
        written = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written), encoding="utf-8"))
        return command("chat", "--max-tokens", "8", "--model", model, *options)

    return run


def said(done: Called) -> list[str]:
    """What is no statistics of an answer."""
    return [line for line in done.err.splitlines() if " read, " not in line]


def asked(question: str, *images: Path) -> dict[str, Any]:
    parts = [*({"type": "image", "image": image.read_bytes()} for image in images), {"type": "text", "text": question}]
    return {"role": "user", "content": parts}


@pytest.mark.parametrize("options", [(), ("--draft", "ngram"), ("--kv-bits", "8", "--kv-group-size", "32")])
def test_images_come_with_the_next_question(
    chat: Any, folder: Path, pictures: list[Path], options: tuple[str, ...]
) -> None:
    model, tokenizer = load(folder)
    done = chat(f"/image {pictures[0]}", f'/image "{pictures[1]}"', "what?", "and then?", options=options)
    assert done.code == 0, done.err
    if "--kv-bits" not in options:
        messages = [asked("what?", *pictures)]
        first = generate(model, tokenizer, messages, max_tokens=8)
        messages += [{"role": "assistant", "content": first}, asked("and then?")]
        assert done.out == f"{first}\n{generate(model, tokenizer, messages, max_tokens=8)}\n"
    assert said(done) == [f"mlx-kv: {path} comes with the next question; /undo takes it back" for path in pictures]
    known = [int(each) for each in re.findall(r"(\d+) known", done.err)]
    assert known[0] == 0
    assert known[1] > 40  # both images, and what came before them


def test_the_next_question_has_them_and_no_other(chat: Any, folder: Path, pictures: list[Path]) -> None:
    model, tokenizer = load(folder)
    done = chat("hello", f"/image {pictures[0]}", "what?")
    first = generate(model, tokenizer, [{"role": "user", "content": "hello"}], max_tokens=8)
    messages = [asked("hello"), {"role": "assistant", "content": first}, asked("what?", pictures[0])]
    assert done.out == f"{first}\n{generate(model, tokenizer, messages, max_tokens=8)}\n"


def test_the_file_may_go(chat: Any, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen stays, also where its conversation is read again."""
    whole = chat(f"/image {pictures[0]}", "what?", "and?").out
    from mlx_kv.cli import chat_session

    real = chat_session.image_content

    def read_and_remove(path: Path) -> bytes:
        content = real(path)
        path.unlink()
        return content

    monkeypatch.setattr(chat_session, "image_content", read_and_remove)
    assert chat(f"/image {pictures[0]}", "what?", "and?").out == whole


def test_undo_takes_images_back_before_turns(chat: Any, pictures: list[Path]) -> None:
    one, other = (f"/image {path}" for path in pictures)
    plain, with_one = chat("what?").out, chat(one, "what?").out
    assert plain != with_one
    done = chat(
        one, other, "/undo", "/undo", "what?", one, other, "/undo", "/undo", "/undo", one, "what?", "/undo", "/undo"
    )
    assert done.out == plain + with_one
    assert [line for line in said(done) if "comes with" not in line] == [
        "mlx-kv: removed the last image: 1 left for the next question",
        "mlx-kv: removed the last image: 0 left for the next question",
        "mlx-kv: removed the last image: 1 left for the next question",
        "mlx-kv: removed the last image: 0 left for the next question",
        "mlx-kv: removed the last turn: 0 turns left",
        "mlx-kv: removed the last turn: 0 turns left",
        "mlx-kv: the conversation has no turns: there is nothing to remove",
    ]


def test_reset_and_load_leave_no_image(chat: Any, pictures: list[Path], tmp_path: Path) -> None:
    one, path = f"/image {pictures[0]}", tmp_path / "c.safetensors"
    plain = chat("what?").out
    assert chat(one, "/reset", "what?").out == plain
    both = chat("hi", f"/save {path}", "what?").out
    assert chat("hi").out + chat(one, f"/load {path}", "what?").out == both


def test_a_conversation_with_images_is_not_saved(chat: Any, pictures: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    done = chat("hi", f"/image {pictures[0]}", "what?", f"/save {path}", "/undo", f"/save {path}")
    refused, saved = (line for line in said(done) if "images" in line or "saved" in line)
    assert refused == "mlx-kv: this conversation has images, which no file keeps: /undo the turns with them first"
    assert saved == f"mlx-kv: saved to {path}: 1 turn"


def test_what_is_no_image_is_refused_in_a_line(chat: Any, pictures: list[Path], tmp_path: Path) -> None:
    text, cut, large = tmp_path / "notes.txt", tmp_path / "cut.png", tmp_path / "large.png"
    text.write_text("no picture")
    cut.write_bytes(pictures[0].read_bytes()[:500])
    large.write_bytes(bytes(33 << 20))
    names = ("", tmp_path, tmp_path / "nothing.png", text, cut, large, "http://127.0.0.1/a.png", '"open')
    done = chat(*(f"/image {name}" for name in names), "what?")
    words = (
        "/image needs the name of a file",
        "is no file: give the name of one",
        "is no file: give the name of one",
        "is none of PNG",
        "an image is damaged",
        "more than 33,554,432 bytes: make it smaller",
        "is no file: give the name of one",
        "put the name in double quotation marks",
    )
    assert done.code == 0
    for line, wanted in zip(said(done), words, strict=True):
        assert wanted in line
    assert done.out == chat("what?").out


def test_a_model_that_reads_text_says_so(chat: Any, pictures: list[Path]) -> None:
    done = chat(f"/image {pictures[0]}", "import os", model="reference")
    (line,) = said(done)
    assert "this model reads no images: give it text alone" in line
    assert done.out == chat("import os", model="reference").out


def test_help_has_it(chat: Any) -> None:
    assert "/image  FILE: adds an image to the next question" in chat("/help").err

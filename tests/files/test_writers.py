"""A writer that is killed leaves the old file or the new one; one that fails leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from effort import THOROUGH
from going_on import filled

from mlx_kv import (
    KVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import atomic_write

KILLS = 200 if THOROUGH else 10


WRITER = """
import sys
import mlx.core as mx
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.files.serialization import save_prompt_cache
path = sys.argv[1]
caches = {}
for which, value in (("A", 1.0), ("B", 2.0)):
    caches[which] = [KVCache() for _ in range(4)]
    for cache in caches[which]:
        cache.update_and_fetch(*[mx.full((1, 4, 1000, 64), value)] * 2)
while True:
    for which in "AB":
        save_prompt_cache(path, caches[which], {"which": which})
        print(which, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path, chosen = tmp_path / "a.safetensors", random.Random(0)
    save_prompt_cache(tmp_path / "older.safetensors", [filled(KVCache())])
    older = (tmp_path / "older.safetensors").read_bytes()
    left = 0
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(chosen.random() * 0.1)
            writer.send_signal(signal.SIGKILL)
        caches, metadata = load_prompt_cache(path, return_metadata=True)
        value = {"A": 1.0, "B": 2.0}[metadata["which"]]
        for cache in caches:
            assert cache.offset == 1000
            assert all(mx.all(x[:, :, :1000] == value).item() for x in (cache.keys, cache.values))
        temporary = [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
        assert len(temporary) <= 1  # what earlier ones left was removed
        left += len(temporary)
    assert left > 0, "no writer was killed while it wrote"
    assert (tmp_path / "older.safetensors").read_bytes() == older
    save_prompt_cache(path, caches)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "older.safetensors"]


def test_a_writer_at_work_keeps_its_file_and_a_failed_one_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with atomic_write(path) as file:
        file.write(b"first")
        with atomic_write(path) as other:
            other.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    words: Any = {"a": object()}
    with pytest.raises(TypeError):
        tensor_files.write(path, {}, words)
    breaks: Any = {"a": SimpleNamespace(dtype=mx.float32, nbytes=4, shape=(1,))}  # only when its bytes are asked for
    with pytest.raises(TypeError):
        tensor_files.write(path, breaks, {})
    assert path.read_bytes() == b"first"
    (tmp_path / "link").symlink_to(path)
    tensor_files.write(tmp_path / "link", {}, {})
    assert (tmp_path / "link").is_symlink()
    assert tensor_files.read(path).words == {}
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "link"]

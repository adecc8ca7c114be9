"""Runs mlx-lm's own tests of its server that speak HTTP, against `mlx-kv serve`.

    python tools/mlx_lm_server_tests.py MLX_LM/tests/test_server.py --model build/smollm2

MLX_LM is a clone of mlx-lm, of the version that is installed. Its tests run as they are; only what starts a server in
their classes is replaced: the first class gets a server with a model, the second one with that model as its own draft.
Tests in these classes that ask no server are left out. Needs the package `requests`, as they do. The model must have
a chat template.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from server import OURS, process

CLASSES: dict[str, tuple[str, ...]] = {
    "TestServer": (),
    "TestServerWithDraftModel": ("--draft-model", "MODEL", "--num-draft-tokens", "3"),
}


def against(url_options: list[str], tests: Any) -> None:
    """Has a class of tests talk to a server of ours."""
    stack = contextlib.ExitStack()

    def start(cls: Any) -> None:
        url, _ = stack.enter_context(process([*OURS, *url_options]))
        cls.port = int(url.rpartition(":")[2])

    tests.setUpClass, tests.tearDownClass = classmethod(start), classmethod(lambda cls: stack.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="tests/test_server.py of mlx-lm")
    parser.add_argument("--model", required=True)
    asked = parser.parse_args()
    spec = importlib.util.spec_from_file_location("mlx_lm_test_server", asked.file)
    if spec is None or spec.loader is None or not asked.file.is_file():
        parser.error(f"{asked.file} is no file of Python: give tests/test_server.py of a clone of mlx-lm")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.TestSuite()
    for name, options in CLASSES.items():
        tests = getattr(module, name)
        own = [asked.model if word == "MODEL" else word for word in options]
        against(["--model", asked.model, "--alias", "chat_model", *own], tests)
        names = unittest.defaultTestLoader.getTestCaseNames(tests)
        suite.addTests(tests(one) for one in names if "self.port" in inspect.getsource(getattr(tests, one)))
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())


if __name__ == "__main__":
    main()

"""Runs mlx-lm's own tests of its caches with the classes and functions of mlx-kv in its names' place.

    python tools/mlx_lm_cache_tests.py MLX_LM/tests/test_prompt_cache.py

MLX_LM is a clone of mlx-lm. Its tests run as they are. Replaced are the names that exist in both libraries, and the
model, which would be fetched: a bundled one reads in its place. What `state` begins with is planes here, one or three,
where mlx-lm has an array for one: they are compared plane by plane.

What differs in layout is listed: in `DIFFERENCES` an assertion of a test by its number, which must fail, and behind
which the test goes on; in `REFUSED` a test that ends in an error of ours. Ends with exit code 1 where anything else
fails, and where something that is listed does not differ.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_kv  # first: it loads a tuned BLAS

# isort: split
from mlx_lm.models import cache as stock

CAPACITY = "slots come in multiples of 256, so buffers are longer than what is held"
READ = "rows that differ are read in slots in steps of 16; padding is not stored, and what is no token is masked"
SLOTS = "another slot holds a position, the mask says the same of positions; and it is a row of a matrix"
ALONE = "padding is not stored, so a row alone has none to mask"

# Of a test, an assertion by its number in the source, from 1 on: why it does not hold here.
DIFFERENCES: dict[tuple[str, int], str] = {
    ("test_batch_kv_cache", 1): READ,
    ("test_batch_kv_cache", 2): f"`state` begins with planes; {CAPACITY}",
    ("test_batch_kv_cache", 3): READ,
    ("test_batch_kv_cache", 4): READ,
    ("test_batch_kv_cache", 8): "padding is not stored: none lies before a row's tokens, so `left_padding` is 0",
    (
        "test_batch_rotating_kv_cache",
        1,
    ): "queries of padding, whose results are nobody's, may see anything, not nothing",
    ("test_batch_rotating_kv_cache", 2): READ,
    ("test_batch_rotating_kv_cache", 4): READ,
    ("test_batch_rotating_kv_cache", 6): READ,
    ("test_batch_rotating_kv_cache", 7): READ,
    ("test_batch_rotating_kv_cache", 8): CAPACITY,
    ("test_batch_rotating_kv_cache", 9): ALONE,
    ("test_batch_rotating_kv_cache", 10): f"{ALONE}; mlx-lm's hides a token here that is in the window",
    ("test_merge_with_empty_caches", 3): CAPACITY,
    ("test_merge_with_empty_caches", 4): CAPACITY,
    ("test_rotating_cache_mask", 16): SLOTS,
    ("test_rotating_cache_mask", 18): SLOTS,
    ("test_trim_cache", 6): "a ring has slots for its last write beside its window: it can take it back",
}
# A test that cannot go on: words of the error, and why.
REFUSED = {
    "test_save_load_batch_caches": (
        "keys came with rows 4, but this batch has rows 2",
        "it writes four rows into batches of two, which mlx-lm's take; shapes that do not fit are refused here",
    ),
    "test_save_load_quantized_cache": (
        "visible before a first fetch, and after one of packed planes",
        "attention over arrays must not see `bits`, and after ten tokens it gets arrays: dequantised, and fused",
    ),
}


def replace_names(module: ModuleType) -> list[str]:
    """Puts ours in the place of mlx-lm's wherever a name is public in both; returns the names."""
    both = [name for name in sorted(mlx_kv.__all__) if hasattr(stock, name) and hasattr(module, name)]
    for name in both:
        setattr(module, name, getattr(mlx_kv, name))
    return both


class PlaneByPlane:
    """mlx.core, but that its `array_equal` compares tuples, too."""

    def __init__(self, own: ModuleType) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def array_equal(self, first: Any, second: Any) -> bool:
        if not isinstance(first, tuple):
            return bool(self._own.array_equal(first, second))
        return len(first) == len(second) > 0 and all(map(self._own.array_equal, first, second))


class Tokenizer:
    """The tokenizer of a model, but that it gives arrays of MLX, whatever it is of."""

    def __init__(self, own: Any, array: Callable[[Any], Any]) -> None:
        self._own, self._array = own, array

    def encode(self, text: str, **_: Any) -> Any:
        return self._array([self._own.encode(text)])


class Numbered(ast.NodeTransformer):
    """Gives each assertion of a test, in the order of the source, its number: `with NOTED(test, number): ...`."""

    def __init__(self) -> None:
        self._test, self._number = "", 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._test, self._number = node.name, 0
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if not isinstance(call, ast.Call) or not getattr(call.func, "attr", "").startswith("assert"):
            return node
        self._number += 1
        item = ast.parse(f"NOTED({self._test!r}, {self._number})", mode="eval").body
        return ast.copy_location(ast.With([ast.withitem(item)], [node]), node)


class Noted:
    """Which of the listed assertions failed, and which of them held."""

    def __init__(self) -> None:
        self.differing: set[tuple[str, int]] = set()
        self.holding: set[tuple[str, int]] = set()

    @contextlib.contextmanager
    def assertion(self, test: str, number: int) -> Iterator[None]:
        """Around an assertion: behind one that is listed, and fails or cannot be said, the test goes on."""
        key = test, number
        if key not in DIFFERENCES:
            yield
            return
        try:
            yield
        except Exception:
            self.differing.add(key)
        else:
            self.holding.add(key)


def verdict(name: str, result: unittest.TestResult, noted: Noted) -> Iterator[tuple[bool, str]]:
    """What is to be said of a test that ran, each with whether it is as it should be."""
    for _, error in (*result.failures, *result.errors):
        words, why = REFUSED.get(name, (None, ""))
        yield (True, f"differs: {why}") if words is not None and words in error else (False, f"failed\n{error}")
    if name in REFUSED and result.wasSuccessful():
        yield False, "is listed as one that is refused, and passes: take it out of REFUSED"
    for key in sorted(key for key in DIFFERENCES if key[0] == name):
        if key in noted.differing - noted.holding:
            yield True, f"differs in assertion {key[1]}: {DIFFERENCES[key]}"
        else:
            how = "holds" if key in noted.holding else "did not come"
            yield False, f"assertion {key[1]} is listed as differing, and {how}: take it out of DIFFERENCES"


def load(path: Path, noted: Noted) -> ModuleType:
    """The module of a file of tests, its assertions numbered."""
    tree = ast.fix_missing_locations(Numbered().visit(ast.parse(path.read_text(), str(path))))
    module = ModuleType("mlx_lm_test_prompt_cache")
    vars(module)["NOTED"] = noted.assertion
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="tests/test_prompt_cache.py of mlx-lm")
    asked = parser.parse_args()
    if not asked.file.is_file() or asked.file.suffix != ".py":
        parser.error(f"{asked.file} is no file of Python: give tests/test_prompt_cache.py of a clone of mlx-lm")
    noted = Noted()
    module: Any = load(asked.file, noted)
    print("ours:", ", ".join(replace_names(module)))
    model, tokenizer = mlx_kv.load(mlx_kv.model_path("reference"))
    mx, module.mx = module.mx, PlaneByPlane(module.mx)
    module.load = lambda *_: (model, Tokenizer(tokenizer, mx.array))

    tests = module.TestPromptCache
    names = unittest.defaultTestLoader.getTestCaseNames(tests)
    wrong = sorted(({name for name, _ in DIFFERENCES} | REFUSED.keys()) - set(names))
    for name in wrong:
        print(f"{name}: is listed, and there is no such test: take it out")
    for name in names:
        result = unittest.TestResult()
        unittest.TestSuite([tests(name)]).run(result)
        said = list(verdict(name, result, noted))
        for _, words in said or [(True, "passed")]:
            print(f"{name}: {words}")
        wrong += [name for good, _ in said if not good]
    print(f"{len(names)} tests, {len(wrong)} not as they should be")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

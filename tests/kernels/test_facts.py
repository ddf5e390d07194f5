"""What C++ and Python answer about many tensors: the same, or Python alone."""

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fresh_python import FreshPython
from torch import Tensor, nn

from tritonamp.kernels import _facts, _native

NUMBERS = "addresses", "versions"


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_facts, "_native", _facts._InPython)


def tensors() -> list[Tensor]:
    """Of many kinds, all plain ones."""
    x = torch.randn(4, 6)
    written = torch.zeros(3)
    written.add_(1).mul_(2)
    return [
        x,
        x[1:, 2:],
        x.t(),
        nn.Parameter(torch.zeros(5).half()),
        nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, device="meta"),
        (x * 1).requires_grad_() * 2,
        written,
    ]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_same_numbers(name: str, cpp: Any) -> None:
    given = tensors()
    found = getattr(cpp, name)(given)
    assert found == getattr(_facts, name)(tuple(given)) == getattr(_facts, name)(given)
    assert len(found) == 8 * len(given)
    one_by_one = {"addresses": Tensor.data_ptr, "versions": lambda t: t._version}
    assert list(_facts.numbers(found)) == [one_by_one[name](t) for t in given]
    assert getattr(_facts, name)([]) == b""


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("span", [range(0, 12), range(3, 7), range(5, 5)])
def test_versions_are_noted_at_their_places(span: range, subclass: bool, cpp: Any) -> None:
    """Of plain tensors by C++; of others by Python, and then C++ has written nothing."""
    given = tensors()
    if subclass:
        given[6] = torch.zeros(2).as_subclass(Wrapped)
    for tensor in (given[3].detach(), given[6], given[9]):
        tensor.zero_()
    before, noted = [100 + i for i in range(12)], array("Q", range(100, 112))
    is_plain = not (subclass and 6 in span)
    assert cpp.note_versions(given, noted, span.start, span.stop) is (True if is_plain else None)
    expected = [t._version if i in span else 100 + i for i, t in enumerate(given)]
    assert list(noted) == (expected if is_plain else before)
    noted = array("Q", before)
    _facts.note_versions(given, noted, span)
    assert list(noted) == expected


@pytest.mark.parametrize(("size", "span"), [(11, (-1, 2)), (14, (0, 13)), (11, (0, 12))])
def test_versions_are_noted_inside_of_list_and_buffer(
    size: int, span: tuple[int, int], cpp: Any
) -> None:
    noted = array("Q", [7] * size)
    assert cpp.note_versions(tensors(), noted, *span) is None
    assert list(noted) == [7] * size


def test_the_very_gradients(cpp: Any) -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    params[0].grad, params[2].grad = torch.ones(3), torch.ones(3).to_sparse()
    found = cpp.grads(params)
    assert all(a is b.grad for a, b in zip(found, params, strict=True))
    del found
    references = []
    for _ in range(3):
        cpp.grads(params)
        references.append(sys.getrefcount(params[0].grad))
    assert references[1:] == references[:-1]


OTHERS: dict[str, Any] = {
    "dtype": lambda x: x.half(),
    "shape": lambda x: x.view(6, 4),
    "strides": lambda x: x.t().contiguous().t(),
    "device": lambda x: x.to("meta"),
    "negated": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("ask", ["cpp", "python"])
@pytest.mark.parametrize("kind", OTHERS)
def test_facts_tell_apart_what_lies_otherwise(
    kind: str, ask: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(ask)
    if ask == "python" and kind == "negated":
        pytest.skip("a bit that gradients never have; Python does not look for it")
    x, y = torch.zeros(4, 6), torch.zeros(3)
    known, _ = _facts.facts([[x, y]])
    assert known == _facts.facts([[x.clone(), y.clone()]])[0]
    for other in ([OTHERS[kind](x), y], [y, OTHERS[kind](x)]):
        assert _facts.facts([other])[0] != known
    assert _facts.facts([[x]])[0] != known


@pytest.mark.parametrize("ask", ["cpp", "python"])
def test_facts_of_several_lists(ask: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ask)
    params, grads = [torch.zeros(4), torch.zeros(2, 3)], [torch.zeros(4), torch.zeros(2, 3)]
    kind, pointers = _facts.facts([params, grads])
    assert list(_facts.numbers(pointers)) == [t.data_ptr() for t in (*params, *grads)]
    assert _facts.facts([params, [grads[0], params[1]]])[0] != kind, "the first list's tensor again"
    assert _facts.facts([params, [t.view_as(t) for t in params]])[0] == kind, "another object"
    assert _facts.facts([params, [t.half() for t in grads]])[0] != kind


@pytest.mark.parametrize("ask", ["cpp", "python"])
def test_dense(ask: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ask)
    x = torch.zeros(3)
    assert list(_facts.dense([x, x])) == [0, 1]
    assert list(_facts.dense([x, None, x.to_sparse(), x])) == [0, 3]
    assert list(_facts.dense([])) == []


@pytest.mark.parametrize("name", [*NUMBERS, "dense", "grads", "count_write"])
def test_python_answers_for_what_is_not_plain(name: str, cpp: Any) -> None:
    leaf = torch.zeros(2).as_subclass(Wrapped)
    assert getattr(cpp, name)([torch.zeros(2), leaf]) is None
    assert getattr(cpp, name)((torch.zeros(2),)) is None
    getattr(_facts, name)([torch.zeros(2), leaf])
    assert leaf._version == (name == "count_write")


@pytest.mark.parametrize("ask", ["cpp", "python"])
def test_writes_are_counted(ask: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ask)
    given = [torch.zeros(2), nn.Parameter(torch.zeros(2))]
    saved = (given[1] * given[1]).sum()
    _facts.count_write(given)
    assert [t._version for t in given] == [1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("ask", ["cpp", "python"])
def test_torchs_errors(ask: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ask)
    with torch.inference_mode():
        given = [torch.zeros(2)]
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        _facts.versions(given)


# where it cannot be built


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A machine that has not built it yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _native.build.cache_clear()
    monkeypatch.setattr(_facts, "_native", _facts._InPython)
    monkeypatch.setattr(_facts, "PLAIN_STEPS", False)
    yield
    _native.build.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "FileNotFoundError"),
        (f"{sys.executable} -c raise(SystemExit('nothing-works-here'))", "nothing-works-here"),
    ],
    ids=["missing", "broken"],
)
def test_python_answers_where_it_cannot_be_built(
    compiler: str,
    why: str,
    unbuilt: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level("INFO", "tritonamp"):
        _facts.use_native()
    assert _facts._native is _facts._InPython
    assert "_native.cpp is not used" in caplog.text and why in caplog.text
    assert _facts.versions([torch.zeros(2)]) == bytes(8)


def test_no_compiler_at_all(
    unbuilt: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with caplog.at_level("INFO", "tritonamp"):
        _facts.use_native()
    assert _facts._native is _facts._InPython and "there is no C++ compiler" in caplog.text


def test_another_object_layout_is_refused(
    unbuilt: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pointer to a tensor's TensorImpl must be found where torch says that it is."""
    stub = SimpleNamespace(prepare=lambda *args: False)
    monkeypatch.setattr(_native, "_built", lambda: "")
    monkeypatch.setattr(_native, "_loaded", lambda path: stub)
    with caplog.at_level("INFO", "tritonamp"):
        _facts.use_native()
    assert _facts._native is _facts._InPython and "is not as expected" in caplog.text


def test_prepare_finds_one_address_only(cpp: Any) -> None:
    x = torch.zeros(2)
    assert not cpp.prepare(x, 12345, nn.Parameter)
    assert cpp.prepare(x, x._cdata, nn.Parameter)


def test_the_switch(fresh_python: FreshPython, tmp_path: Path) -> None:
    """``TRITONAMP_PLAIN_STEPS=1``: nothing is built."""
    program = (
        "from tritonamp.kernels import _facts, _native\n"
        "_facts.use_native()\n"
        "print(_native.PLAIN_STEPS, _facts._native is _facts._InPython)"
    )
    run = fresh_python.run(program, tmp_path, {"TRITONAMP_PLAIN_STEPS": "1", "PATH": ""})
    assert run.stdout.split() == ["True", "True"]

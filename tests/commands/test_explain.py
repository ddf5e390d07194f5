"""``python -m tritonamp explain``: what it finds, prints and returns."""

import io
import re
import sys
from pathlib import Path

import pytest

import tritonamp
from tritonamp.__main__ import main
from tritonamp.commands.error_pages import find, sections, words
from tritonamp.commands.markdown import shown
from tritonamp.commands.question_pages import questions

TRACEBACK = """
Epoch 3:  12%|#2        | 40/320 [00:07<00:49,  5.6it/s, loss=2.31]
\x1b[31mTraceback (most recent call last):\x1b[0m
  File "/home/me/run/train.py", line 123, in step
    scaler.unscale_(optimizer)
  File "/opt/lib/python3.9/site-packages/torch/cuda/amp/grad_scaler.py", line 282, in unscale_
    raise {error}
"""
FOUND = [
    ("ValueError: Attempting to unscale FP16 gradients.", "Attempting to"),
    (TRACEBACK.format(error="ValueError('Attempting to unscale FP16 gradients.')"), "Attempting"),
    ("attempting to unscale\n   \u201cfp16\u201d gradients", "Attempting to"),
    ("unscale FP16 gradients", "Attempting to"),
    ("unscale() has already been called on this optimizer", "unscale_() has"),
    ("RuntimeError: expected scalar type BFloat16 but found Float", "expected scalar"),
    ("expected scalar type torch.float32 but found torch.float16", "expected scalar"),
    ("mat1 and mat2 must have the same dtype, but got BFloat16 and Half", "expected scalar"),
    ("Input type (float) and bias type (c10::BFloat16) should be the same", "Input type"),
    ("Input type (torch.cuda.HalfTensor) and weight type (torch.FloatTensor) should be", "Input"),
    ("Found dtype Half but expected Float", "Found dtype"),
    ("ImportError: cannot import name 'amp' from 'apex' (/lib/apex/__init__.py)", "No module"),
    ("ModuleNotFoundError: No module named 'apex.amp'", "No module"),
    ("expected scalar type Long but found Float", "expected target"),
    ("probability tensor contains either `inf`, `nan` or element < 0", "probability"),
    ("User provided device_type of 'cuda', but CUDA is not available. Disabling", "In CPU"),
    ("\"slow_conv2d_cpu\" not implemented for 'BFloat16'", "not implemented"),
    ("value cannot be converted to type at::BFloat16 without overflow", "value cannot"),
    ("Function 'LogSoftmaxBackward0' returned nan values in its 0th output.", "Function"),
    ("Function MyOwnBackward returned nan values in its 2th output", "Function"),
    ("Gradient overflow.  Skipping step, loss scaler 3 reducing loss scale to 1.0", "Gradient"),
    ("FloatingPointError: Minimum loss scale reached (1e-06). Your loss is", "Current loss"),
    ("Loss is inf, stopping training", "Loss is nan"),
    ("UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.", "Detected"),
    ("step <= 12 skipped (5 of 12, rank 1): training goes wrong", "step 17"),
    (
        "ValueError: model: GPT2 cannot be enabled, its submodule 'h.0' is enabled already",
        "is enabled",
    ),
]


@pytest.mark.parametrize(("text", "title"), FOUND)
def test_texts_are_found_as_they_are_pasted(text: str, title: str) -> None:
    first, *_ = find(text, sections())
    assert first.title.startswith(title)


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'weights.pt'",
        "expected scalar type Long but found Int",  # labels: no matter of precision
        "nan",  # part of several texts
        "dtype",
        "T4",  # a letter is part of a text, and no text is meant
        "",
    ],
)
def test_others_are_not(text: str) -> None:
    assert find(text, sections()) == []


def test_the_last_error_of_a_text_comes_first() -> None:
    text = "Gradient overflow.  Skipping step\nNo inf checks were recorded\nLoss is nan, stopping"
    pages = find(f"{text} training\n", sections())
    assert [page.title.split()[0] for page in pages] == ["Loss", "No", "Gradient"]


def test_titles_find_their_own_section() -> None:
    pages = sections()
    assert [find(page.title, pages)[0].title for page in pages] == [page.title for page in pages]


def test_a_text_leads_to_one_section() -> None:
    texts = [words(text) for page in sections() for text in {words(text) for text in page.texts}]
    assert sorted(texts) == sorted(set(texts))


def test_a_comment_in_a_program_ends_no_section() -> None:
    own = next(i for i, page in enumerate(sections()) if page.title.startswith("step 17"))
    assert all("With tritonamp." in page.body for page in sections()[:own])


def test_prints_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "Attempting", "to", "unscale", "FP16", "gradients"]) == 0
    title, line, *body = capsys.readouterr().out.splitlines()
    assert title == "Attempting to unscale FP16 gradients" and line == "=" * len(title)
    (page,) = find(title, sections())
    assert body[0] == "" and " ".join(body).split() == page.body.split()
    assert 'amp = tritonamp.enable(model, optimizer, level="O2")' in body


def test_code_is_kept_and_text_is_filled() -> None:
    text = "One `x` and [a\nlink](../README.md#more) to\nread, or [that](#loss-is-nan-or-inf).\n\n"
    code = "```python\nx = [1](2)\n\n\ny = 3\n```"
    listed = "\n- one\n  more\n- two\n\n| a |\n| - |"
    page, titles = Path("/pages/diagnosis/errors.md"), ["Loss is `nan` or inf"]
    assert shown(text + code + listed, page, titles) == (
        f"One `x` and a link to read, or that.\n\n{code}\n- one more\n- two\n\n| a |\n| - |\n\n"
        "More:\n- a link: /pages/README.md #more\n"
        '- that: python -m tritonamp explain "Loss is nan or inf"'
    )


def test_a_page_that_an_installed_package_lacks(tmp_path: Path) -> None:
    page = tmp_path / "questions.md"
    page.touch()
    text = shown("[Bytes](../bench/README.md#bytes-of-a-step) and [this](questions.md)", page)
    assert "- Bytes: bench/README.md of a checkout #bytes-of-a-step\n" in text
    assert f"- this: {page}" in " ".join(text.split())


def test_links_lead_to_files_and_sections(capsys: pytest.CaptureFixture[str]) -> None:
    pages, page = sections(), Path(tritonamp.__file__).parent / "diagnosis" / "errors.md"
    seen = []
    for section in pages:
        text = shown(section.body, page, [each.title for each in pages])
        assert "](" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for link in text.partition("\nMore:\n")[2].splitlines():
            to = link.partition(": ")[2]
            seen.append(to)
            if to.startswith("python -m tritonamp explain "):
                assert find(to.partition(" explain ")[2], pages)
            else:
                assert Path(to.split(" #")[0]).is_file()
    assert len(seen) > 20


def test_without_a_text_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    titles = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert titles == [*(p.title for p in sections()), "", *(p.title for p in questions())]


def test_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRACEBACK.format(error="RuntimeError('unscale_() is being called after step().')")
    log = text.encode() + b"\xff Loss is nan, stopping training"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    assert main(["explain", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Loss is nan, stopping training\n")
    assert out.endswith(
        "The text holds others, too:\n\n  step() has already been called since the last update()\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'weights.pt'",
        "expected scalar type Long but found Int",
        # tritonamp's own, which explain themselves
        "optimizer: LBFGS calls its closure many times inside one step, so a step cannot",
        "optimizer: SGD holds 2 parameter(s) that are not the model's",
    ],
)
def test_what_is_not_found_has_status_1(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 1
    out = capsys.readouterr().out
    assert out == (
        "No section is about this text. `python -m tritonamp explain` without a text lists all "
        "sections.\n"
    )


def test_nothing_to_look_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "  42"])
    assert exit_.value.code == 2
    assert "expected the text of an error, or a question, got '42'" in capsys.readouterr().err

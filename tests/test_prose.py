"""Docstrings, messages and READMEs have plain words, full entries of arguments, and real names."""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "tritonamp", "kernels", "tests", "bench"
PAGES = sorted([ROOT / "README.md", *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
SOURCES = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))

DIALECT = re.compile(
    r"\b(anew|besides?|in the place of|nobody|somebody|told by|(tells?|told) (\w+ )?apart"
    r"|(go(es)?|went) on from)\b",
    re.IGNORECASE,
)
"""Words that have plainer ones: again, next to, in addition to, instead of, no one, continues."""

NO_NOUN = re.compile(
    r"(?:^|\.)\s*(?!None|True|False)[*`\w]+(?:, [*`\w]+)*: "
    r"(?:of\b|it is\b|they are\b|see `*[\w.]+`*[.;]?\s*$).*",
    re.MULTILINE,
)
"""The entry of an argument that is no noun phrase and needs its neighbours to be understood."""

ELSEWHERE = {
    "DenseReluDense",
    "GraphLowering",
    "LayerNormKernelImpl",
    "PowBackward0",
    "addmm_impl_cpu_",
    "distributed_config",
    "do_sample",
    "duration_predictor",
    "encode_image",
    "encode_text",
    "forward_encoder",
    "forward_features",
    "forward_head",
    "half_optimizer",
    "huber_loss",
    "lamb_stage1_cuda",
    "lamb_stage2_cuda",
    "lu_cpu",
    "other_optimizer",
    "pytorch_lightning",
    "record_stream",
    "rollout_log_probs",
    "text_encoder",
    "torch_compile",
    "unscale_l2norm",
    "use_vllm",
}
"""Names in READMEs that belong to other projects, or to the reader's program."""


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return the place and the text of every docstring, those of constants included."""
    return [
        (f"{path.relative_to(ROOT)}:{text.lineno}", str(text.value))
        for path in SOURCES
        for text in texts_of(ast.parse(path.read_text()).body)
    ]


@pytest.fixture(scope="module", autouse=True)
def read_docstrings() -> None:
    """Read all sources before it counts as the time of a test."""
    docstrings()


def strings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every string of the product, of errors and logs above all."""
    for path in SOURCES:
        place = path.relative_to(ROOT)
        if place.parts[0] in ("tritonamp", "kernels"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{place}:{node.lineno}", node.value


def texts_of(body: list[ast.stmt]) -> Iterator[ast.Constant]:
    """Yield the texts that are statements by themselves, on every level."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement.value
        yield from texts_of(getattr(statement, "body", []))


def pages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every line of a README, without programs."""
    for path in PAGES:
        for number, line in enumerate(without_programs(path).split("\n"), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def without_programs(path: Path) -> str:
    """Return a page with the lines of its programs empty."""
    program = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    return program.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())


def words_of_code() -> set[str]:
    """Return all words of sources, without comments and docstrings, and the names of files."""
    prose = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
    found = set()
    for path in (p for f in FOLDERS for p in (ROOT / f).rglob("*.*")):
        found.add(path.stem)
        if path.suffix == ".py" and path != Path(__file__):
            found.update(re.findall(r"\w+", prose.sub("", path.read_text())))
        elif path.suffix in (".c", ".cpp", ".h", ".sh"):
            found.update(re.findall(r"\w+", path.read_text()))
    return found


@pytest.mark.parametrize("texts", [docstrings, strings, pages])
def test_words_are_plain(texts):
    found = [(place, m[0]) for place, text in texts() for m in DIALECT.finditer(text)]
    assert found == []


def test_articles_fit_the_next_word():
    """A name that a message inserts may begin with any sound, so no article stands before it."""
    # parsed only where an article stands before a brace, or at the end of a part of a text
    sources = [(path, path.read_text()) for path in SOURCES]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, source in sources
        if re.search(r"\b[Aa]n? [{\"']", source)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr)
        for text, inserted in itertools.pairwise(node.values)
        if isinstance(text, ast.Constant) and re.search(r"\b[Aa]n? $", str(text.value))
        if isinstance(inserted, ast.FormattedValue)
    ]
    assert found == []


def test_arguments_stand_alone():
    found = [(place, m[0]) for place, text in docstrings() for m in NO_NOUN.finditer(text)]
    assert found == []


def test_the_lint_finds_what_it_is_for():
    for text in ("made anew", "Beside the scale", "tells it apart", "goes on from", "nobody"):
        assert DIALECT.search(text)
    for text in ("Args:\n    what: it is.", "policy: of them. dtype: half.", "    r: see `f`."):
        assert NO_NOUN.search(text)
    assert not NO_NOUN.search("Args:\n    rate: the share of it.\n    x: sum; see `f`, too.")


def test_names_in_readmes_exist():
    """Identifiers with an underscore or an inner capital, in backquotes."""
    known = words_of_code() | ELSEWHERE
    quoted = [(place, q) for place, line in pages() for q in re.findall(r"`([^`]+)`", line)]
    names = [(place, name) for place, q in quoted for name in re.findall(r"[A-Za-z_]\w*", q)]
    named = [(place, n) for place, n in names if re.search(r"[a-z][A-Z]|_[a-z]", n)]
    assert len(named) > 500
    assert [(place, n) for place, n in named if n not in known] == []


def test_names_of_other_projects_are_used():
    text = "".join(line for _, line in pages())
    assert sorted(name for name in ELSEWHERE if name not in text) == []


def test_the_table_of_shared_kernel_files_is_whole():
    table = (ROOT / "kernels" / "README.md").read_text()
    named = set(re.findall(r"`(_\w+\.(?:py|cpp|h))`", table))
    assert named == {p.name for p in (ROOT / "kernels").glob("_[a-z]*.*") if p.is_file()}

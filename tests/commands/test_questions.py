"""What ``python -m tritonamp explain`` answers to questions, and that errors still come first."""

from importlib import resources

import pytest

from tritonamp.__main__ import main
from tritonamp.commands.error_pages import find, sections
from tritonamp.commands.question_pages import answers, questions

ASKED = [
    ("EMA", "How do I keep a moving average"),
    ("how to keep an exponential moving average of my weights", "How do I keep a moving average"),
    ("polyak averaging", "How do I keep a moving average"),
    ("is it faster", "Is it faster"),
    ("is tritonamp faster than torch.amp?", "Is it faster"),
    ("bf16 or fp16", "Which level"),
    ("float16 vs bfloat16", "Which level"),
    ("O1 or O2", "Which level"),
    ("gradient penalty", "How do I write a gradient penalty"),
    ("WGAN-GP", "How do I write a gradient penalty"),
    ("torch.autograd.grad create_graph", "How do I write a gradient penalty"),
    ("several optimizers", "How do I train with several optimizers"),
    ("two optimizers GAN", "How do I train with several optimizers"),
    ("multiple losses", "How do I train with several losses"),
    ("accumulate gradients over 4 batches", "How do I accumulate"),
    ("learning rate warmup", "How do I use a scheduler"),
    ("OneCycleLR", "How do I use a scheduler"),
    ("re-run jupyter cell", "How do I run a notebook cell"),
    ("why are the first steps skipped", "How do I see skipped steps"),
    ("log to tensorboard", "How do I log to"),
    ("wandb", "How do I log to"),
    ("why is training slow on my laptop", "Why is it slow on a CPU"),
    ("CUDA out of memory", "It runs out of memory"),
    ("gradient checkpointing", "It runs out of memory"),
    ("8bit adam", "It runs out of memory"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB", "It runs out of"),
    ("gradient clipping", "How do I accumulate or clip"),
    ("loss scale keeps dropping", "How do I see skipped steps"),
    ("turn it off", "How do I run a notebook cell"),
    ("huggingface trainer", "How do I use several GPUs, Lightning"),
    ("mixed precision slow cpu", "Why is it slow on a CPU"),
    ("loss becomes nan after 1000 steps", "Why is my loss NaN"),
    ("my loss is NaN from the first step", "Why is my loss NaN"),
    ("one layer must stay FP32", "How do I keep one layer"),
    ("exclude a layer from amp", "How do I keep one layer"),
    ("custom loss outside forward", "How do I compute a loss"),
    ("torch.compile", "Where does torch.compile go"),
    ("fine tune a pretrained model", "How do I freeze layers"),
    ("LoRA", "How do I freeze layers"),
    ("p.data", "How do I clamp"),
    ("clamp weights", "How do I clamp"),
    ("DataParallel", "How do I use several GPUs"),
    ("deterministic results", "How do I make a run reproducible"),
    ("Ctrl-C", "How do I save and resume"),
    ("resume training after interrupt", "How do I save and resume"),
    ("export to onnx", "How do I export"),
    ("T4", "Which level"),
    ("run a bfloat16 model on a T4", "How do I run a bf16 model"),
    ("DQN soft update", "How do I make a target network"),
    ("frozen copy of the model", "How do I make a target network"),
    ("model.eval", "How do I evaluate"),
    ("validation accuracy", "How do I evaluate"),
    ("fabric", "How do I use several GPUs, Lightning"),
    ("training is slower than fp32", "Is it faster"),
    ("hide warnings", "How do I see skipped steps"),
    ("silence the skip message", "How do I see skipped steps"),
    ("turn off logging", "How do I see skipped steps"),
    ("disable mixed precision", "How do I run a notebook cell"),
]


@pytest.mark.parametrize(("text", "title"), ASKED)
def test_questions_find_their_answer(
    text: str, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *text.split()]) == 0
    assert capsys.readouterr().out.startswith(title)


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'weights.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'run.pt'",
        "RuntimeError: CUDA error: device-side assert triggered",
        "size mismatch for head.weight: copying a param with shape torch.Size([4])",
        "optimizer: SGD holds 2 parameter(s) that are not the model's",
        "RuntimeError: Trying to backward through the graph a second time",
        "UserWarning: Was asked to gather along dimension 0, but all input tensors were scalars",
        "ValueError: can't optimize a non-leaf Tensor",
        "optimizer: LBFGS calls its closure many times inside one step, so a step cannot",
        "how do I cook pasta",
        "what is it",  # no word of content
        " ".join(f"save resume word{i}" for i in range(16)),  # too long for a question
    ],
)
def test_other_texts_are_no_questions(text: str) -> None:
    assert answers(text, questions()) == []


def test_titles_and_phrases_find_their_own_section() -> None:
    pages = questions()
    lost = [
        (page.title, text)
        for page in pages
        for text in (page.title, *page.phrases)
        if page not in answers(text, pages)
    ]
    assert lost == []
    assert [answers(page.title, pages)[0] for page in pages] == pages


def test_every_section_is_a_question_with_phrases() -> None:
    page = resources.files("tritonamp").joinpath("questions.md").read_text("utf-8")
    titles = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    assert [question.title for question in questions()] == titles
    assert len(titles) == 26 and all(title.endswith("?") for title in titles)
    assert all(len(question.phrases) >= 4 for question in questions())


def test_no_error_text_becomes_a_question() -> None:
    assert all(find(text, sections()) for page in sections() for text in page.texts)


def test_prints_the_answer_without_its_phrases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "EMA"]) == 0
    title, line, *body = capsys.readouterr().out.splitlines()
    (page,) = answers("EMA", questions())
    assert (title, line) == (page.title, "=" * len(title))
    code = page.body[page.body.index("```") :].splitlines()
    first = body.index(code[0])
    assert body[first : first + len(code)] == code and "ema = amp.ema(0.999)" in code
    assert "averages the FP32 masters" in " ".join(body[:first]) and "polyak" not in body
    assert "README.md #a-moving-average-of-the-weights" in " ".join(body)


def test_names_the_questions_that_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "colab"]) == 0
    first, second = answers("colab", questions())
    out = capsys.readouterr().out
    assert out.startswith(first.title)
    assert out.endswith(f"\nOther questions that it may mean:\n\n  {second.title}\n")

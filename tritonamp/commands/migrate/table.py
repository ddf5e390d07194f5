"""The one table of both dialects: a call of torch.amp or apex.amp, what takes its place, and why.

In the patterns a name in capitals stands for any expression, ``SCALER`` for the scaler, ``AMP`` for
the handle; an argument with a value may be left out, by its place too where it is in capitals.
Loops are converted by these rows alone, and in a file that is refused each line that a row knows
is listed with the row's right-hand side.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from tritonamp.commands.migrate.names import Names
from tritonamp.commands.migrate.script import Script

_MOVED = {
    r"torch\.(cuda\.amp\.|cpu\.amp\.|cuda\.amp\.grad_scaler\.|)GradScaler": "torch.amp.GradScaler",
    r"torch\.(amp|(cuda|cpu)\.amp)(\.autocast_mode)?\.autocast": "torch.autocast",
    r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
}
_text = cache(ast.unparse)  # of patterns
_WORD = re.compile(r"\b[A-Z][A-Z_]+\b")


@dataclass(frozen=True)
class Row:
    """One call, in what it is and what it becomes.

    Attributes:
        call: a pattern.
        becomes: what takes its place, "" for nothing; arguments that a call left out are dropped.
        reason: why, for whoever reads the diff.
    """

    call: str
    becomes: str
    reason: str

    @cached_property
    def pattern(self) -> ast.AST:
        """The pattern as a tree."""
        statement = ast.parse(self.call).body[0]
        return statement.value if isinstance(statement, ast.Expr) else statement

    def match(self, names: Names, node: ast.AST) -> dict[str, ast.AST] | None:
        """Return what the capitals stand for where ``node`` is such a call; else None."""
        if type(node) is not type(self.pattern):
            return None
        found: dict[str, ast.AST] = {}
        return found if _match(names, self.pattern, node, found) else None

    def write(self, text: Callable[[ast.AST], str], found: dict[str, ast.AST], amp: str) -> str:
        """Return what takes the place of a match, in the texts of what it found."""
        texts = {name: text(node) for name, node in found.items()} | {"AMP": amp}
        head, parenthesis, rest = self.becomes.partition("(")
        given = [a for a in rest[:-1].split(", ") if {*_WORD.findall(a)} <= {*texts}]
        whole = head + parenthesis + ", ".join(given) + rest[-1:]
        return _WORD.sub(lambda word: texts.get(word[0], word[0]), whole)

    def edit(self, script: Script, node: ast.AST, found: dict[str, ast.AST], amp: str) -> None:
        """Note that what the row becomes takes the place of ``node``."""
        script.replace(node, self.write(script.edited, found, amp), self.reason)


ENABLE = "AMP = tritonamp.enable(model, optimizer, level=...)"
CLIP = Row(
    "torch.nn.utils.clip_grad_norm_(PARAMETERS, MAX_NORM, NORM_TYPE=0)",
    "AMP.clip_grad_norm_(MAX_NORM)",
    "clips the true gradients in the step's own pass",
)
BACKWARD = Row(
    "SCALER.scale(LOSS).backward(retain_graph=RETAIN_GRAPH)",
    "AMP.backward(LOSS, retain_graph=RETAIN_GRAPH)",
    "scales the loss, and runs backward",
)
UNSCALE = Row("SCALER.unscale_(OPTIMIZER)", "AMP.unscale_()", "true FP32 gradients from here on")
STEP = Row("SCALER.step(OPTIMIZER)", "OPTIMIZER.step()", "unscales, checks, and steps or skips")
UPDATE = Row("SCALER.update()", "", "the step moves the loss scale by itself")
GET_SCALE = Row("SCALER.get_scale()", "AMP.scaler.get_scale()", "the scale of the handle's scaler")
SCALER_STATE = "the handle's state; it loads that of a GradScaler that was on"
SCALER_ROWS = (
    BACKWARD,
    UNSCALE,
    STEP,
    UPDATE,
    GET_SCALE,
    Row("SCALER.state_dict()", "AMP.state_dict()", SCALER_STATE),
    Row("SCALER.load_state_dict(STATE)", "AMP.load_state_dict(STATE)", SCALER_STATE),
    Row("SCALER.is_enabled()", "AMP.policy.op_policy", "the level says whether it is on"),
)
AUTOCAST = Row("torch.autocast(...)", "AMP.autocast()", "the dtype and the level of the handle")
_SCALED = "apex.amp.scale_loss(LOSS, OPTIMIZERS, LOSS_ID=0, MODEL=0, DELAY_UNSCALE=0)"
SCALED_BACKWARD = Row(
    f"with {_SCALED} as SCALED:\n    SCALED.backward(retain_graph=RETAIN_GRAPH)",
    "AMP.backward(LOSS, OPTIMIZERS, loss_id=LOSS_ID, retain_graph=RETAIN_GRAPH)",
    BACKWARD.reason,
)
SCALE_LOSS = Row(
    _SCALED, "AMP.scale_loss(LOSS, OPTIMIZERS, loss_id=LOSS_ID)", "the handle's scale of the loss"
)
MASTER_PARAMS = Row("apex.amp.master_params(OPTIMIZER)", "AMP.master_params()", "FP32 parameters")
APEX_ROWS = (
    SCALED_BACKWARD,
    SCALE_LOSS,
    MASTER_PARAMS,
    Row("apex.amp.state_dict()", "AMP.state_dict()", "the handle's state"),
    Row("apex.amp.load_state_dict(STATE)", "AMP.load_state_dict(STATE)", "the handle's state"),
)
MADE = Row("torch.amp.GradScaler(...)", ENABLE, "casts every forward, scales losses, checks steps")
INITIALIZE = Row("apex.amp.initialize(...)", ENABLE, "enables in place, and gives the handle")
_REGISTERED = "half_function", "float_function", "promote_function"
REGISTERS = tuple(
    Row(f"apex.amp.{name}", f"tritonamp.{name}", "apex's lists, by their name")
    for name in (*_REGISTERED, *(f"register_{name}" for name in _REGISTERED), "disable_casts")
)


ALL = (MADE, INITIALIZE, *SCALER_ROWS, AUTOCAST, *APEX_ROWS, *REGISTERS)


def today(name: str | None) -> str | None:
    """Return the one name of today for what torch has, or had, under several."""
    for old, new in _MOVED.items():
        if name is not None and re.fullmatch(old, name):
            return new
    return name


def _match(names: Names, pattern: object, node: object, found: dict[str, ast.AST]) -> bool:
    if isinstance(pattern, ast.Name | ast.Attribute) and isinstance(node, ast.AST):
        text = _text(pattern)
        if text.isupper():
            first = found.setdefault(text, node)
            return ast.unparse(first) == ast.unparse(node)
        if text.startswith(("torch.", "apex.")):
            return today(names.qualified(node)) == text
    if isinstance(pattern, list) and isinstance(node, list):
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(_match(names, *pair, found) for pair in pairs)
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        func = _match(names, pattern.func, node.func, found)
        return func and _match_arguments(pattern, node, found)
    if not isinstance(pattern, ast.AST) or type(pattern) is not type(node):
        return pattern == node
    fields = [name for name in pattern._fields if name not in ("ctx", "type_comment")]
    return all(_match(names, getattr(pattern, f), getattr(node, f), found) for f in fields)


def _match_arguments(pattern: ast.Call, call: ast.Call, found: dict[str, ast.AST]) -> bool:
    needed = [ast.unparse(arg) for arg in pattern.args]
    if needed == ["..."]:
        return True
    optional = [keyword.arg or "" for keyword in pattern.keywords]
    places = needed + [name for name in optional if name.isupper()]  # in small letters: by name
    given: dict[str, ast.AST] = dict(zip(places, call.args, strict=False))
    given |= {(keyword.arg or "").upper(): keyword.value for keyword in call.keywords}
    found |= given
    known = {*needed, *map(str.upper, optional)}
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    return not starred and len(call.args) <= len(places) and {*needed} <= {*given} <= known

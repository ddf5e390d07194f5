"""The list for a loop with torch.amp: the line of ``enable``, and the scaler of the handle.

All other lines stay, because ``amp.scaler`` works as torch's GradScaler, in every function.
"""

import ast
import re
from collections import defaultdict

from tritonamp.commands.migrate.imports import add_import
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.source import Function

_SCALER = re.compile(r"torch\.((cuda|cpu)\.)?(amp\.)?(grad_scaler\.)?GradScaler")
_AUTOCAST = re.compile(r"torch\.((cuda|cpu)\.)?(amp\.)?(autocast_mode\.)?autocast")
_SETTINGS = "init_scale", "growth_factor", "backoff_factor", "growth_interval"
_ASKED = {"parameters", "named_parameters", "train", "eval"}  # what scripts call on a model
_OPTIMIZER = re.compile(r"(^|[._])(optim(izer)?|opt(?=_?\w))(_?(\w|gen|disc))?$", re.IGNORECASE)
_MAKER = re.compile(r"(optim\w*|\w*adam\w*|\w*sgd|\w*lamb|lion|rmsprop|muon)$", re.IGNORECASE)
_LOOPS = ast.For | ast.While | ast.AsyncFor
_ENABLES = "casts every forward of the model, and checks every step of the optimizer"
_STAYS = "works as torch's GradScaler, so that the other lines stay"
_BY_HAND = (
    '`import tritonamp`, `amp = tritonamp.enable(model, optimizer, level="O1")` where both exist '
    '("O0" for runs without torch.amp), and `amp.scaler` here; other lines stay. If the two do not '
    "exist here, write `scaler = amp.scaler` below them instead, and hand the scaler on"
)

_NO_SCALE = (
    "The gradient of a sum over samples needs no scale: leave out `scaler.scale`, and the division "
    "by the scale"
)
_SCALED_OUTPUTS = (
    "`torch.autograd.grad` of a scaled tensor keeps the scale low",
    f"it works as before: where its gradient overflows, the scale falls. {_NO_SCALE}",
)
_SCALED_FACTORS = (
    "`grad_outputs` of `torch.autograd.grad` have the scale",
    f"the scale does not fall where these gradients overflow. {_NO_SCALE}",
)


def edit(script: Script) -> None:
    """Edit the lines that make scalers; without any, add a line for autocasts in bfloat16."""
    calls = [node for node in script.nodes if isinstance(node, ast.Call)]
    scalers = [c for c in calls if _SCALER.fullmatch(script.qualified(c.func))]
    casts = [c for c in calls if _AUTOCAST.fullmatch(script.qualified(c.func))]
    given = [value for c in casts for value in (*c.args, *(k.value for k in c.keywords))]
    wide = [value for value in given if script.qualified(value) == "torch.bfloat16"]
    dtype = f", dtype={script.segment(wide[0])}" if wide else ""
    done = any(script.qualified(c.func) == "tritonamp.enable" for c in calls)
    makers = scalers if scalers or done or not wide else [*filter(_makes_optimizer, calls)]
    for scope in dict.fromkeys(map(script.scope, makers)):
        own = [call for call in makers if script.scope(call) is scope]
        _Loop(script, scope, sorted(own, key=script.start)).edit(dtype, bool(scalers))
    for call in calls if scalers else ():
        if script.qualified(call.func) == "torch.autograd.grad":
            args = dict(zip(("outputs", "inputs", "grad_outputs"), call.args, strict=False))
            args |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            if _is_scaled(args.get("outputs")):
                script.note(call, *_SCALED_OUTPUTS)
            elif _is_scaled(args.get("grad_outputs")):
                script.note(call, *_SCALED_FACTORS)


def _is_scaled(value: ast.expr | None) -> bool:
    """Return whether an expression has the method ``scale`` of what is called a scaler."""
    return value is not None and any(
        isinstance(node, ast.Attribute)
        and node.attr == "scale"
        and "scaler" in ast.unparse(node.value).lower()
        for node in ast.walk(value)
    )


def _makes_optimizer(node: ast.AST) -> bool:
    name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
    return _MAKER.match(name) is not None


class _Loop:
    """A function or module that makes scalers, and the models and optimizers for them.

    Attributes:
        statements: the statements that make a scaler; without a scaler, an optimizer.
        targets: the names that these statements bind.
        visible: the nodes that bind each name, or attribute of self, that the scope sees.
        optimizers, models: names of both; empty if unknown.
    """

    def __init__(self, script: Script, scope: ast.AST, calls: list[ast.Call]) -> None:
        self.script, self.scope, self.calls = script, scope, calls
        self.statements = list(map(script.statement, calls))
        self.targets = {name for s in self.statements for name in _texts(s, ast.Store)}
        self.visible = self._visible()
        self.optimizers = self._optimizers()
        self.models = self._models()

    def _visible(self) -> dict[str, list[ast.AST]]:
        script, found = self.script, defaultdict[str, list[ast.AST]](list)
        owner = script.parents.get(self.scope)
        for node in script.nodes:
            if isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store):
                name, scope = getattr(node, "arg", "") or ast.unparse(node), script.scope(node)
                of_self = isinstance(owner, ast.ClassDef) and script.parents.get(scope) is owner
                if scope is self.scope or (of_self and name.startswith("self.")):
                    found[name].append(node)
        return found

    def _chosen(self, names: set[str]) -> list[str]:
        """Return visible names in the order of the file; of ``model`` and ``self.model`` one."""
        visible = [name for name in self.visible if name in names and name != "self"]
        visible.sort(key=lambda name: self.script.start(self.visible[name][0]))
        return [*{name.split(".")[-1]: name for name in visible}.values()]

    def _values(self, name: str) -> list[ast.expr]:
        """Return the values that assignments give a visible name."""
        parents = [self.script.parents[binding] for binding in self.visible[name]]
        return [p.value for p in parents if isinstance(p, ast.Assign | ast.AnnAssign) and p.value]

    def _optimizers(self) -> list[str]:
        """Return the visible names that look like optimizers, or are made like one."""
        named = {name for name in self.visible if _OPTIMIZER.search(name)}
        made = {n for n in self.visible if any(map(_makes_optimizer, self._values(n)))}
        return self._chosen(named | made)

    def _models(self) -> list[str]:
        """Return the models that the optimizers are made from; else all that have parameters."""
        asked = [n for n in self.script.nodes if getattr(n, "attr", "") in _ASKED]
        called = [n for n in asked if getattr(self.script.parents[n], "func", None) is n]
        models = {self._base(node.value) for node in called} - {*self.optimizers}
        values = [value for name in self.optimizers for value in self._values(name)]
        read = {self._base(n) for v in values for n in ast.walk(v) if isinstance(n, ast.expr)}
        return self._chosen(models & read or models)

    def _base(self, node: ast.AST) -> str:
        """Return the visible name of the object that ``node`` is, or is a part of."""
        while isinstance(node, ast.Attribute) and ast.unparse(node) not in self.visible:
            node = node.value
        return text if (text := ast.unparse(node)) in self.visible else ""

    def edit(self, dtype: str, has_scaler: bool) -> None:
        """Edit the lines of the scalers; note them if the place of ``enable`` is not known."""
        script, first, place = self.script, self.statements[0], self._place()
        moved = [s for s in self.statements if script.start(s) < script.start(place)]
        above = script.line_start(script.start(first))
        below = script.line_end(script.end(place))
        offset = below if moved or not has_scaler else above
        if not self._can_move(moved) or not self._exist(offset):
            what = f"`{ast.unparse(self.calls[0])}`: its model and optimizer are not known here"
            return script.note(first, what, _BY_HAND) if has_scaler else None
        amp = "handle" if "amp" in script.meanings else "amp"
        lines = [f"{amp} = {self._enable(dtype)}"]
        why = f"moves below line {place.end_lineno}, where its model and optimizer exist"
        for call, statement in zip(self.calls, self.statements, strict=True) if has_scaler else ():
            if statement in moved:
                before, behind = script.segment(statement).split(script.segment(call), 1)
                lines.append(f"{before}{amp}.scaler{behind}")
                script.delete(statement, why)
            else:
                script.replace(call, f"{amp}.scaler", _STAYS)
        text = script.newline.join(f"{script.indentation(first)}{line}" for line in lines)
        script.insert_line(offset, text, _ENABLES)
        script.is_list = True
        add_import(script)

    def _place(self) -> ast.stmt:
        """Return the last statement that makes a model or optimizer between scaler and loop."""
        found = self.statements[0]
        block = self.script.block(found)
        for statement in block[block.index(found) + 1 :]:
            if isinstance(statement, _LOOPS) or self.targets & _texts(statement, ast.Load):
                break
            if {*self.models, *self.optimizers} & _texts(statement, ast.Store):
                found = statement
        return found

    def _can_move(self, moved: list[ast.stmt]) -> bool:
        """Return whether lines can be written around the first statement, and ``moved`` moved."""
        # code before the first statement in its line (``if fp16:``) would not apply to a new line
        script, first = self.script, self.statements[0]
        start = script.start(first)
        if script.text[script.line_start(start) : start].strip():
            return False
        plain = [isinstance(s, ast.Assign | ast.AnnAssign) for s in moved]
        in_block = [s in script.block(first) for s in moved]
        return all(plain + in_block) and not getattr(first, "decorator_list", [])

    def _exist(self, end: int) -> bool:
        """Return whether all models and optimizers exist at the offset ``end``."""
        # the variable of a loop or comprehension is one of several models
        is_init = getattr(self.scope, "name", "") == "__init__"
        loops = [n for n in self.script.nodes if isinstance(n, ast.For | ast.comprehension)]
        several = {node for loop in loops for node in ast.walk(loop.target)}
        for name in [*self.models, *self.optimizers]:
            if several & {*self.visible[name]}:
                return False
            here = [n for n in self.visible[name] if self.script.scope(n) is self.scope]
            elsewhere = len(here) < len(self.visible[name]) and not is_init
            if not elsewhere and not any(self.script.start(n) < end for n in here):
                return False
        return bool(self.models and self.optimizers)

    def _enable(self, dtype: str) -> str:
        """Return the call of ``enable``; with one of ``handle`` if the code may run again."""
        script, call = self.script, self.calls[0]
        lists = [f"[{', '.join(names)}]" for names in (self.models, self.optimizers)]
        both = [text if "," in text else text[1:-1] for text in lists]
        tests = [k.value for k in call.keywords if k.arg == "enabled"]
        tests += [p.test for p in [script.parents[call]] if isinstance(p, ast.IfExp)]
        texts = [script.segment(test) for test in tests if ast.unparse(test) != "True"]
        on = " and ".join(f"({text})" if " " in text else text for text in texts)
        level = f'"O1" if {on} else "O0"' if on else '"O1"'
        settings = ", ".join(script.segment(k) for k in call.keywords if k.arg in _SETTINGS)
        scaler = f", scaler=tritonamp.GradScaler({settings})" if settings else ""
        scaler += f" if {on} else None" if settings and on else ""
        makings = [n for n in self.visible[self.models[0]] if not isinstance(n, ast.arg)]
        once = {outer for node in makings for outer in script.around(node)}
        outer = [o for o in script.around(call) if isinstance(o, _LOOPS | Function)]
        again = any(o not in once and getattr(o, "name", "") != "__init__" for o in outer)
        start = f"tritonamp.handle({self.models[0]}) or " if again else ""
        return f"{start}tritonamp.enable({', '.join(both)}, level={level}{dtype}{scaler})"


def _texts(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the texts of the names and attributes that ``node`` reads or binds."""
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), context)}

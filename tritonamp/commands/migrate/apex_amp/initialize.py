"""``amp.initialize(...)``: what it is given, and the same for ``enable``."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.loops.handle import as_condition
from tritonamp.commands.migrate.loops.imports import Import
from tritonamp.commands.migrate.reading.script import Script

_PARAMETERS = (
    "models optimizers enabled opt_level cast_model_type patch_torch_functions "
    "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
    "min_loss_scale max_loss_scale"
).split()
_UNNEEDED = {"num_losses", "verbosity"}


@dataclass(frozen=True)
class Call:
    """A call of ``amp.initialize``.

    Attributes:
        statement: the statement that it is.
        model: what it makes half.
        arguments: what ``enable`` gets.
        trains: whether there are optimizers.
        several: whether there are several.
        switch: the expression that turns mixed precision on; None: it always is.
        lifted: the ``if`` around it, where ``enable`` can take its place.
        only_if: the test of an ``if`` that stays around it.
        before: lines to stand before it: comments, and names for the results.
    """

    statement: ast.stmt
    model: ast.expr
    arguments: str
    trains: bool
    several: bool
    switch: ast.expr | None
    lifted: ast.If | None
    only_if: ast.expr | None
    before: tuple[str, ...]


def read(script: Script, name: ast.AST) -> Call | None:
    """Return the call of ``name``, which is ``amp.initialize``; None, and a refusal, if unclear."""
    call = script.source.parents[name]
    statement = script.source.parents[call]
    if not isinstance(call, ast.Call) or not isinstance(statement, (ast.Assign, ast.Expr)):
        script.refuse(
            name,
            "amp.initialize is not a statement of its own",
            "`amp = tritonamp.enable(model, optimizer, level=...)` works in place",
        )
        return None
    given = dict(zip(_PARAMETERS, call.args, strict=False))
    given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    unknown = {*given} - {*_PARAMETERS} or any(k.arg is None for k in call.keywords)
    if unknown or "models" not in given or any(isinstance(a, ast.Starred) for a in call.args):
        script.refuse(call, f"`{ast.unparse(call)}`", "name each argument of `tritonamp.enable`")
        return None
    options = _options(script, call, given)
    if options is None:
        return None
    enabled = given.get("enabled")
    if isinstance(enabled, ast.Constant):
        if not enabled.value:
            script.refuse(call, "mixed precision is off here", "decide on a level for `enable`")
            return None
        enabled = None
    around = _if_around(script, statement)
    is_plain = enabled is None and all(option.startswith("scaler=") for option in options)
    if enabled is not None and not all(option.startswith("scaler=") for option in options):
        script.refuse(
            call,
            f"options that hold for the level alone, beside `enabled={ast.unparse(enabled)}`",
            'call `enable` in both branches of an `if`, with level="O0" in one',
        )
        return None
    lifted = around if around is not None and is_plain and _only_this(around, statement) else None
    switch = enabled if enabled is not None else around.test if around is not None else None
    level = script.edits.text(given["opt_level"]) if "opt_level" in given else '"O1"'
    if lifted is not None or enabled is not None:
        assert switch is not None
        level = f"({level})" if isinstance(given.get("opt_level"), ast.IfExp) else level
        level += f' if {as_condition(switch)} else "O0"'
        options = [f"{option} if {as_condition(switch)} else None" for option in options]
    optimizers = given.get("optimizers")
    trains = optimizers is not None and ast.unparse(optimizers) not in ("None", "[]")
    before = [] if lifted is None else _own_comments(script, lifted, statement)
    objects, renamed = _objects(script, statement, given["models"], optimizers)
    return Call(
        statement=statement,
        model=given["models"],
        arguments=", ".join([*objects[: 1 + trains], f"level={level}", *options]),
        trains=trains,
        several=isinstance(optimizers, (ast.List, ast.Tuple)) and len(optimizers.elts) > 1,
        switch=switch,
        lifted=lifted,
        only_if=around.test if around is not None and lifted is None else None,
        before=(*before, *renamed),
    )


def _options(script: Script, call: ast.Call, given: dict[str, ast.expr]) -> list[str] | None:
    """Return keywords of ``enable``; None, and a refusal, for values that are not known."""
    options = []
    bounds = []
    for name, value in given.items():
        text = ast.unparse(value)
        plain = value.value if isinstance(value, ast.Constant) else ...
        if name in ("models", "optimizers", "enabled", "opt_level", *_UNNEEDED) or plain is None:
            continue
        if name == "loss_scale" and (isinstance(plain, float | int) or plain == "dynamic"):
            options.append(
                f"loss_scale={text if plain != 'dynamic' else chr(34) + plain + chr(34)}"
            )
        elif name == "keep_batchnorm_fp32" and plain in (True, False, "True", "False"):
            options.append(f"keep_norms_fp32={plain}")
        elif name == "master_weights" and isinstance(plain, bool):
            options.append(f"master_weights={plain}")
        elif name in ("min_loss_scale", "max_loss_scale"):
            bounds.append(f"{name.replace('loss_', '')}={script.source.segment(value)}")
        else:
            script.refuse(
                call,
                f"`{name}={text}`: its value is not known here, and apex has its own rules for it",
                'pass to `enable` what is meant: loss_scale ("dynamic" or a number), '
                "keep_norms_fp32, master_weights, dtype, cast_outputs; or `--to apex`",
            )
            return None
    if bounds:
        options.append(f"scaler=tritonamp.GradScaler({', '.join(bounds)})")
    return options


def _if_around(script: Script, statement: ast.stmt) -> ast.If | None:
    outer = script.source.parents[statement]
    if not isinstance(outer, ast.If) or statement not in outer.body:
        return None
    return outer


def _only_this(outer: ast.If, statement: ast.stmt) -> bool:
    """Whether ``outer`` does nothing but ``statement``, and imports that go away."""
    rest = [s for s in outer.body if s is not statement]
    return not outer.orelse and all(
        isinstance(s, Import)
        or (isinstance(s, ast.Try) and all(isinstance(i, Import) for i in s.body))
        for s in rest
    )


def _own_comments(script: Script, outer: ast.If, statement: ast.stmt) -> list[str]:
    """Return the comments of ``outer`` before ``statement`` that have a line to themselves."""
    start, end = (
        script.source.line_end(script.source.end(outer.test)),
        script.source.start(statement),
    )
    lines = script.source.text[start:end].splitlines() if start < end else []
    return [line.strip() for line in lines if line.strip().startswith("#")]


def _objects(
    script: Script, statement: ast.stmt, models: ast.expr, optimizers: ast.expr | None
) -> tuple[list[str], list[str]]:
    """Return how models and optimizers are called, and what gives them these names before."""
    given = [value for value in (models, optimizers) if value is not None]
    texts = [script.source.segment(value) for value in given]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return texts, []
    target = statement.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) and len(given) > 1 else [target]
    names = [ast.unparse(name) for name in targets]
    if names == [ast.unparse(value) for value in given] or len(names) != len(given):
        return texts, []
    return names, [f"{', '.join(names)} = {', '.join(texts)}"]

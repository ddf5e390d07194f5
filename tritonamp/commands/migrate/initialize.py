"""``amp.initialize(...)``: what it is given, and the same for ``enable``."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.imports import Import
from tritonamp.commands.migrate.script import Script

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
        arguments: what ``enable`` gets.
        several: whether there are several optimizers.
        switch: the expression that turns mixed precision on; None: it always is.
        lifted: the ``if`` around it, where ``enable`` can take its place.
        only_if: the test of an ``if`` that stays around it.
        renamed: the assignment that is left where the results had other names; None: they had not.
    """

    statement: ast.stmt
    arguments: str
    several: bool
    switch: ast.expr | None
    lifted: ast.If | None
    only_if: ast.expr | None
    renamed: str | None


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
    around = _if_around(script, statement)
    lifted = around if around is not None and enabled is None and len(options) == 0 else None
    if lifted is not None and not _only_this(lifted, statement):
        lifted = None
    switch = enabled if enabled is not None else around.test if around is not None else None
    level = script.edits.text(given["opt_level"]) if "opt_level" in given else '"O1"'
    if lifted is not None or enabled is not None:
        condition = ast.unparse(lifted.test if lifted is not None else enabled or call)
        level = f'{level} if {condition} else "O0"'
    objects = [given["models"]]
    optimizers = given.get("optimizers")
    if optimizers is not None and ast.unparse(optimizers) != "None":
        objects.append(optimizers)
    names = [script.source.segment(value) for value in objects]
    return Call(
        statement=statement,
        arguments=", ".join([*names, f"level={level}", *options]),
        several=isinstance(optimizers, (ast.List, ast.Tuple)) and len(optimizers.elts) > 1,
        switch=switch,
        lifted=lifted,
        only_if=around.test if around is not None and lifted is None else None,
        renamed=_renamed(statement, objects),
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


def _renamed(statement: ast.stmt, objects: list[ast.expr]) -> str | None:
    """Return the assignment that gives the results their names, where these are others."""
    if not isinstance(statement, ast.Assign):
        return None
    value = objects[0] if len(objects) == 1 else ast.Tuple(objects, ast.Load())
    text = ast.unparse(value).strip("()") if len(objects) > 1 else ast.unparse(value)
    targets = [ast.unparse(target).strip("()") for target in statement.targets]
    return None if targets == [text.strip("()")] else f"{' = '.join(targets)} = {text}"

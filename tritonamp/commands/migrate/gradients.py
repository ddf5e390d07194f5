"""A loop's own work on gradients: they carry the loss scale until the step unscales them."""

import ast
from collections.abc import Iterable, Sequence

from tritonamp.commands.migrate import table
from tritonamp.commands.migrate.names import Variable
from tritonamp.commands.migrate.objects import Refused, Switch, models_of
from tritonamp.commands.migrate.script import Script


def clips(script: Script, scopes: Iterable[ast.AST]) -> list[ast.Call]:
    """Return the calls of torch that clip gradients in ``scopes``, in order."""
    calls = [node for node in script.nodes if isinstance(node, ast.Call)]
    found = [c for c in calls if f"{script.qualified(c.func)}".startswith("torch.nn.utils.clip_")]
    return sorted((c for c in found if script.scope(c) in scopes), key=script.start)


def clip_of_all(
    script: Script, call: ast.AST | None, models: Sequence[Variable | None]
) -> dict[str, ast.AST] | None:
    """Return the match of a call that clips all gradients of the one model to a 2-norm."""
    match = None if call is None else table.CLIP.match(script, call)
    if match is None or ast.unparse(match.get("NORM_TYPE", ast.Constant(2))) not in ("2", "2.0"):
        return None
    if table.MASTER_PARAMS.match(script, match["PARAMETERS"]) is not None:
        return match
    match match["PARAMETERS"]:
        case ast.Call(func=ast.Attribute(value=model, attr="parameters"), args=[], keywords=[]):
            return match if [script.root(model)] == [*models] else None
    return None


def reads(script: Script, scopes: Iterable[ast.AST]) -> list[ast.Attribute]:
    """Return where the functions ``scopes`` themselves read ``.grad``, in order."""
    loads = [
        n for n in script.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    ]
    read = [n for n in loads if n.attr == "grad" and script.scope(n) in scopes]
    cleared = "zero_", "detach_"
    found = [n for n in read if getattr(script.parents[n], "attr", "") not in cleared]
    return sorted(found, key=script.start)


def refuse_plain_backwards(script: Script, switch: Switch) -> None:
    """Refuse ``loss.backward()`` beside scaled ones: its gradients would not carry the scale."""
    for node in script.nodes:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=loss, attr="backward")) as call):
                items = [i for outer in script.around(node) for i in getattr(outer, "items", [])]
                given = [ast.unparse(i.optional_vars) for i in items if i.optional_vars is not None]
                is_scaled = table.BACKWARD.match(script, call) or ast.unparse(loss) in given
                if not is_scaled and not switch.runs(node, on=False):
                    what = f"`{ast.unparse(call)}` beside scaled losses: a loop of its own"
                    raise Refused(node, what, "`amp.backward(loss, optimizer)` if enabled ones")


def refuse_plain_steps(
    script: Script, optimizer: Variable, models: list[Variable], switch: Switch
) -> None:
    """Refuse steps past the scaler: of its optimizer, and of another over the same models."""
    nodes = script.nodes
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    cleared = {script.root(node.value) for node in attributes if node.attr == "zero_grad"}
    for node in attributes:
        root = script.root(node.value) if node.attr == "step" else None
        if root is None or switch.runs(node, on=False):
            continue
        if root == optimizer or (root in cleared and {*models_of(script, root)} & {*models}):
            what = f"`{ast.unparse(node)}()` steps past the scaler, on what it is for"
            raise Refused(node, what, "hand it to `enable`, its losses to `amp.backward`")

"""Loops with torch's ``autocast`` and ``GradScaler``, to ``enable`` and its handle."""

import ast

from tritonamp.commands.migrate.loops import gradients
from tritonamp.commands.migrate.loops.conditions import Folding
from tritonamp.commands.migrate.loops.handle import AFTER_BOTH, known_as
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.torch_amp.autocasts import Autocasts
from tritonamp.commands.migrate.torch_amp.making import Making
from tritonamp.commands.migrate.torch_amp.scaler import find_making
from tritonamp.commands.migrate.torch_amp.uses import Uses, scaled_backward

SCALERS = tuple(
    f"torch.{module}GradScaler"
    for module in ("", "amp.", "cuda.amp.", "cpu.amp.", "cuda.amp.grad_scaler.")
)


def convert(script: Script) -> None:
    """Note what turns the loop of ``script`` into one with a handle, or why that cannot be."""
    scalers = [call for call in script.calls(*SCALERS) if not _is_other_side(script, call)]
    if not scalers:
        _refuse_foreign_scalers(script, None)
        return
    if len(scalers) > 1:
        for call in scalers[1:]:
            script.refuse(
                call,
                f"a second GradScaler (the first is made in line {scalers[0].lineno})",
                "make one handle for all models and optimizers, and give each loss a loss_id",
            )
        return
    making = find_making(script, scalers[0])
    if making is None:
        return
    _convert(script, making)
    _refuse_foreign_scalers(script, making.root)


def _is_other_side(script: Script, call: ast.Call) -> bool:
    """Whether ``call`` is y of ``x if new_torch else y``, and x makes a scaler, too."""
    parent = script.source.parents[call]
    if not isinstance(parent, ast.IfExp) or parent.orelse is not call:
        return False
    other = parent.body
    return isinstance(other, ast.Call) and script.qualified(other.func) in SCALERS


def _convert(script: Script, making: Making) -> None:
    autocasts = Autocasts(script, making)
    if not autocasts.agree():
        return
    uses = Uses(script, making)
    for node in reversed(script.flow.occurrences(making.root)):
        if not making.makes(node) and not autocasts.holds(node):
            uses.rewrite(node)
    for stranger in making.naming.strangers():
        uses.refuse(stranger, f"`{ast.unparse(stranger)}`, of an object that is not followed")
    _look_at_gradients(script, making, uses)
    autocasts.convert()
    making.write(autocasts.dtype)
    models = known_as(script, making.models)
    Folding(script, making.name, models, making.switch).fold()


def _look_at_gradients(script: Script, making: Making, uses: Uses) -> None:
    """Mend or refuse what meets gradients that carry the scale, or that lack it."""
    occurrences = script.flow.occurrences(making.root)
    scopes = {script.source.scope(n) for n in occurrences if not isinstance(n, ast.arg)}
    for backward in gradients.plain_backwards(script, scopes, making.switch):
        gradients.refuse_plain_backward(script, backward, making.name)
    gradients.refuse_plain_steps(script, making.optimizers, making.models, making.switch)
    for scope in scopes - uses.unscaled:
        for read in gradients.reads(script, scope):
            if uses.is_behind_a_step(read):
                uses.refuse(read, f"`{ast.unparse(read)}` behind the step, where it is unscaled")
    for call in gradients.clips(script):
        name = making.visible_at(call)
        done = script.source.scope(call) in uses.unscaled or script.edits.covers(call)
        if name is None or done or making.switch.off_at(call):
            continue
        limit = gradients.limit_of_all(script, call, making.models)
        if limit is None:
            script.refuse(
                call,
                f"`{ast.unparse(call)}` of gradients that carry the loss scale",
                "put `scaler.unscale_(optimizer)` before it, and run this command again",
            )
        else:
            reason = "clips the true gradients: before, they carried the scale"
            gradients.clip(script, call, limit, name, reason)


def _refuse_foreign_scalers(script: Script, root: Variable | None) -> None:
    """Refuse uses of a scaler, as ``x.scale(loss).backward()``, that is not made in this file."""
    for node in script.source.nodes:
        scaled = scaled_backward(node)
        match node:
            case ast.Call(func=ast.Attribute(value=unscaled, attr="unscale_"), args=[_]):
                scaled = unscaled
        if scaled is not None and (root is None or script.flow.root(scaled) != root):
            script.refuse(
                node,
                f"`{ast.unparse(scaled)}` is not made in this file, or not by one call",
                f"make the handle where model and optimizer are made ({AFTER_BOTH}) and hand it "
                "over in the place of the scaler; `amp.backward(loss)` here, "
                "`amp.clip_grad_norm_(limit)` for unscale_ and clip, `optimizer.step()` for step "
                "and update",
            )

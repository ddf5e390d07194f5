"""Loops with torch's ``autocast`` and ``GradScaler``, to ``enable`` and its handle."""

import ast
import re

from tritonamp.commands.migrate import gradients, objects, table
from tritonamp.commands.migrate.imports import autocast_options
from tritonamp.commands.migrate.names import Import, Variable
from tritonamp.commands.migrate.objects import Refused, Switch
from tritonamp.commands.migrate.script import Script

_SETTINGS = {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}
_GONE = {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cuda.amp.autocast"}
_HALF = {"torch.float16": None, "torch.half": None, "torch.bfloat16": "torch.bfloat16"}
_SAVES = re.compile("save|load|checkpoint|restore|resume", re.IGNORECASE)
_NOT_FP32 = re.compile(r"autocast(?!\(False|.*enabled=False)|no_grad|inference_mode")
_TRUE = ast.Constant(True)
_EVENTS = table.BACKWARD, table.UNSCALE, table.STEP, table.UPDATE


def convert(script: Script) -> None:
    """Note what turns the loop into one with a handle; Refused where that is not certain."""
    calls = [node for node in script.nodes if table.MADE.match(script, node) is not None]
    calls.sort(key=script.start)
    if len(calls) > 1:
        what = f"a second GradScaler (the first is made in line {calls[0].lineno})"  # type: ignore[attr-defined]
        raise Refused(calls[1], what, "one handle for all, and a loss_id for each loss")
    loop = _TorchLoop(script, calls[0]) if calls else None
    if loop is not None:
        loop.convert()
    for node in script.nodes:
        match = table.BACKWARD.match(script, node) or table.UNSCALE.match(script, node)
        if match and (loop is None or script.root(match["SCALER"]) != loop.root):
            what = f"`{ast.unparse(match['SCALER'])}` is not made in this function or class"
            raise Refused(node, what, "the handle, made with model and optimizer, handed over")


class _TorchLoop:
    """A scaler that becomes a handle, with the autocasts that reach it."""

    def __init__(self, script: Script, call: ast.AST) -> None:
        """Find the objects of the loop; Refused where they are not certain."""
        assert isinstance(call, ast.Call)
        self.script, self.call = script, call
        self.statement = statement = script.statement(call)
        plain = isinstance(statement, ast.Assign) and statement.value is call
        targets: list[ast.expr] = getattr(statement, "targets", []) if plain else []
        self.target = targets[0] if len(targets) == 1 else call  # which is no variable
        root = script.root(self.target)
        known = {keyword.arg for keyword in call.keywords} <= _SETTINGS | {"device", "enabled"}
        known &= all("device" in ast.unparse(a) or isinstance(a, ast.Constant) for a in call.args)
        if root is None or not known:
            what = f"`{ast.unparse(call)}` is not plainly assigned to a variable"
            raise Refused(call, what, "`scaler = GradScaler(enabled=...)`, and this command again")
        tests = [
            k.value for k in call.keywords if k.arg == "enabled" and ast.unparse(k.value) != "True"
        ]
        if any(isinstance(test, ast.Constant) for test in tests):
            raise Refused(call, "mixed precision is off here", "decide on a level for `enable`")
        matches = [table.STEP.match(script, node) for node in script.nodes]
        stepped = [m["OPTIMIZER"] for m in matches if m and script.root(m["SCALER"]) == root]
        optimizers = {script.root(node) for node in stepped}
        optimizer = optimizers.pop() if len(optimizers) == 1 else None
        self.models = [] if optimizer is None else objects.models_of(script, optimizer)
        if optimizer is None or not self.models:
            raise Refused(call, "which one model and optimizer this scaler is for is not certain")
        self.root, self.optimizer = root, optimizer
        self.place = objects.place_behind(script, self.statement, [*self.models, optimizer])
        for value in (k.value for k in call.keywords):
            if objects.changes(script, value, self.statement):
                what = f"`{ast.unparse(value)}` changes after the scaler is made"
                raise Refused(call, what, "a handle is on or off for good: decide before `enable`")
        self.switch = Switch(script, tests[0] if tests else None)
        self.uses = [n for n in script.occurrences(root) if n is not self.target]
        self.scopes = {script.scope(use) for use in self.uses}
        self.renamed = _is_free(script, root)

    def convert(self) -> None:
        """Note all edits."""
        script = self.script
        if self.renamed:
            script.shadowed.add("amp")
        held = {v.name for v in script.group(self.root) if isinstance(v.scope, ast.ClassDef)}
        for node in script.nodes:
            if getattr(node, "attr", None) in held and script.root(node) != self.root:
                self._refuse(node, f"`{ast.unparse(node)}`, of an object that is not followed")
        gradients.refuse_plain_backwards(script, self.switch)
        gradients.refuse_plain_steps(script, self.optimizer, self.models, self.switch)
        self._refuse_scaled_gradients()
        dtype = self._autocasts()
        self._refuse_fp32_forwards()
        for use in reversed(self.uses):
            if self._at(use) is None:
                self._refuse(use, "where the handle is not there, or not yet")
            if not script.covers(use):
                self._use(use)
        self._enable(dtype)

    def _at(self, node: ast.AST) -> str | None:
        """Return what the handle is called at ``node``; None where it is not there, or not yet."""
        script, scope = self.script, self.script.scope(node)
        place, start = self.place, script.start(node)
        branches = {o for o in script.around(place) if isinstance(o, ast.If | ast.Try)}
        later = scope is not script.scope(place) or start >= script.end(place)
        if not later or branches.difference(script.around(node)):
            return None
        name = self.script.name_in(self.root, scope)
        return name if name is None or not self.renamed else self._renamed(name)

    def _renamed(self, text: str) -> str:
        return text.removesuffix(self.root.name) + "amp" if self.renamed else text

    def _refuse(self, node: ast.AST, what: str) -> None:
        by_hand = "`amp.scaler` is a torch GradScaler that can be used as before"
        raise Refused(node, f"{what}: a use of the scaler that is not known", by_hand)

    def _refuse_scaled_gradients(self) -> None:
        """Refuse clips of gradients that carry the scale, and reads of those behind a step."""
        works = [*gradients.clips(self.script, self.scopes)]
        for node in (*works, *gradients.reads(self.script, self.scopes)):
            since = self._since_backward(node)
            if self.switch.runs(node, on=False):
                continue
            if node in works and table.UNSCALE not in since:
                what = f"`{ast.unparse(node)}` of gradients that carry the loss scale"
                raise Refused(node, what, "`amp.clip_grad_norm_(max_norm)`, if it means true ones")
            if node not in works and table.STEP in since:
                what = f"`{ast.unparse(node)}` behind the step, where it is unscaled"
                raise Refused(node, what, "read it before the step, after `amp.unscale_()`")

    def _since_backward(self, node: ast.AST) -> list[table.Row]:
        """Return what the lines between the last backward and ``node`` do with the scaler."""
        script, events = self.script, list[table.Row]()
        for use in self.uses:
            if script.scope(use) is script.scope(node) and script.start(use) < script.start(node):
                around = [*script.around(use)][:4]
                matching = [r for r in _EVENTS for n in around if r.match(self.script, n)]
                events = [] if table.BACKWARD in matching else [*events, *matching]
        return events

    def _use(self, use: ast.AST) -> None:
        """Note the edit of one use by its row of the table, or refuse it."""
        script, amp = self.script, self._renamed(ast.unparse(use))
        parents = script.parents
        for node in [*script.around(use)][:4]:
            for row in table.SCALER_ROWS:
                match = row.match(script, node)
                if match is not None and match["SCALER"] is use:
                    self._row(row, node, match, amp)
                    return
        call = parents[parents[use]] if isinstance(parents[use], ast.keyword) else parents[use]
        if not isinstance(call, ast.Call) or not _SAVES.search(ast.unparse(call.func)):
            self._refuse(use, f"`{ast.unparse(script.statement(use)).splitlines()[0]}`")
        script.replace(use, amp, "saved and loaded as the scaler was")

    def _row(self, row: table.Row, node: ast.AST, match: dict[str, ast.AST], amp: str) -> None:
        script = self.script
        statement = script.statement(node)
        if row in _EVENTS and not isinstance(script.parents[node], ast.Expr):
            self._refuse(node, f"`{ast.unparse(node)}`")
        if row is table.GET_SCALE and self._since_backward(node)[-1:] not in ([], [table.UPDATE]):
            what = f"`{ast.unparse(node)}` between step and update, which are one now"
            raise Refused(node, what, "`amp.scaler.get_scale()` before the step")
        if row is table.UNSCALE and self._clips_next(statement, amp):
            script.delete(statement, "clip_grad_norm_ of the handle takes the scale into account")
        elif not row.becomes:
            script.delete(statement, row.reason)
        else:
            row.edit(script, node, match, amp)

    def _clips_next(self, unscale: ast.AST, amp: str) -> bool:
        """Note the clip by the handle, where unscale, clip and step stand behind one another.

        Nothing can have seen the gradients between them then, which stay scaled until the step.
        """
        script = self.script
        behind = script.block(unscale)[script.block(unscale).index(unscale) + 1 :]  # type: ignore[arg-type]
        if len(behind) < 2 or not isinstance(behind[0], ast.Expr | ast.Assign):
            return False
        clip, step = (getattr(statement, "value", ast.Pass()) for statement in behind[:2])
        match = gradients.clip_of_all(script, clip, self.models)
        reads = gradients.reads(script, {script.scope(unscale)})
        if match is None or table.STEP.match(script, step) is None or reads:
            return False
        table.CLIP.edit(script, clip, match, amp)
        return True

    def _autocasts(self) -> str | None:
        """Note the edits of the autocast blocks that reach the handle; return their dtype."""
        script, dtypes, reached = self.script, set(), False
        for node in script.nodes:
            if table.AUTOCAST.match(script, node) is None or not isinstance(node, ast.Call):
                continue
            given = autocast_options(script, node)
            parent, enabled = script.parents[node], given.get("enabled")
            is_off = isinstance(enabled, ast.Constant) and enabled.value is False
            if is_off or node in getattr(parent, "decorator_list", []):
                continue
            what, name = None, self._at(node)
            dtypes.add(_dtype(script, given))
            if not isinstance(parent, ast.withitem) or parent.optional_vars is not None:
                what = "an autocast that is no `with` block of its own"
            elif name is not None and not self._agrees(node, enabled):
                what = "the autocast is on under another condition than the scaler"
            elif name is not None and ast.unparse(given.get("cache_enabled", _TRUE)) != "True":
                what = "the handle's autocast always keeps what it has cast"
            elif len(dtypes) > 1 or "" in dtypes:
                what = "the autocasts' dtype cannot be read, or they differ"
            if what is not None:
                by_hand = "`with amp.autocast():`, in the level and dtype of `enable` that it means"
                raise Refused(node, f"{what}: `{ast.unparse(node)}`", by_hand)
            if name is not None:
                reached = True
                table.AUTOCAST.edit(script, node, {}, name)
        if not reached:
            what = "no autocast block that this scaler reaches: what runs in half is not known"
            raise Refused(self.call, what)
        return dtypes.pop()

    def _refuse_fp32_forwards(self) -> None:
        """Refuse forwards of the model in FP32, beside the scaler: they would run in half."""
        script = self.script
        for node in script.nodes:
            root = self.script.root(node.func) if isinstance(node, ast.Call) else None
            if root in self.models and script.scope(node) in self.scopes:
                items = [i for o in script.around(node) for i in getattr(o, "items", [])]
                half = any(_NOT_FP32.search(ast.unparse(item)) for item in items)
                if not half and not self.switch.runs(node, on=False):
                    what = f"`{ast.unparse(node)}`, a forward in FP32 so far, would run in half"
                    raise Refused(node, what, "`with amp.autocast():` around it, if it may")

    def _agrees(self, call: ast.Call, enabled: ast.expr | None) -> bool:
        """Whether the autocast is on when the scaler is."""
        if ast.unparse(enabled or _TRUE) == "True":
            return self.switch.expression is None or self.switch.runs(call, on=True)
        return enabled is not None and self.switch.sign(enabled) is True

    def _enable(self, dtype: str | None) -> None:
        """Note the edits that put ``enable`` in the place of the scaler."""
        script, test = self.script, self.switch.expression
        scope = script.scope(self.statement)
        models = [f"{script.name_in(model, scope)}" for model in self.models]
        listed = models[0] if len(models) == 1 else f"[{', '.join(models)}]"
        level, other = (
            "" if test is None else f" if {objects.in_place(test)} else {off}"
            for off in ('"O0"', "None")
        )
        optimizer = script.name_in(self.optimizer, scope)
        options = [listed, f"{optimizer}", f'level="O1"{level}']
        options += [] if dtype is None else [f"dtype={dtype}{other}"]
        settings = [k for k in self.call.keywords if k.arg in _SETTINGS]
        given = ", ".join(map(script.edited, settings))
        options += [f"scaler=tritonamp.GradScaler({given}){other}"] if given else []
        line = f"{self._renamed(ast.unparse(self.target))} = tritonamp.enable({', '.join(options)})"
        script.needs["tritonamp"] = "the handle comes from there"
        if self.place is self.statement:
            script.replace(self.statement, line, table.MADE.reason)
            return
        script.delete(self.statement, "made below, where model and optimizer are both there")
        after = script.line_end(script.end(self.place))
        lead = "" if script.text[:after].endswith("\n") else script.newline
        lead += script.indentation(self.place)
        script.insert(after, f"{lead}{line}{script.newline}")
        script.why(self.place, table.MADE.reason)


def _dtype(script: Script, given: dict[str, ast.expr]) -> str | None:
    """Return what ``enable`` is to be told; None for float16, "" for what cannot be known."""
    if "dtype" in given:
        return _HALF.get(script.qualified(given["dtype"]) or "", "")
    on_cpu = ast.unparse(given.get("device_type", ast.Constant("cuda"))) == "'cpu'"
    return "torch.bfloat16" if on_cpu else None


def _is_free(script: Script, root: Variable) -> bool:
    """Whether ``amp`` can name a handle: it is only a module of torch that goes away."""
    nodes = script.nodes
    shared = any(root.name in getattr(node, "names", []) for node in nodes)  # in a global
    bound = [b for v, bindings in script.bindings.items() if v.name == "amp" for b in bindings]
    of_self = any(isinstance(n, ast.Attribute) and ast.unparse(n) == "self.amp" for n in nodes)
    read = [node for node in nodes if isinstance(node, ast.Name) and node.id == "amp"]
    used = {script.qualified(script.parents[node]) for node in read}
    taken = not all(isinstance(binding, Import) for binding in bound)
    return used <= _GONE and not (taken or shared or of_self)

"""Loops with ``apex.amp``, to ``enable`` and its handle."""

import ast
from typing import NamedTuple

from tritonamp.commands.migrate import gradients, objects, table
from tritonamp.commands.migrate.imports import imported, statements
from tritonamp.commands.migrate.names import Import
from tritonamp.commands.migrate.objects import HANDLE, Refused, Switch
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.text import Function

AMP = "apex.amp"
_OR_APEX = "; or `--to apex`, which needs no handle"
_PARAMETERS = (
    "models optimizers enabled opt_level cast_model_type patch_torch_functions "
    "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
    "min_loss_scale max_loss_scale"
).split()
_NO_OPTIONS = {"models", "optimizers", "enabled", "opt_level", "num_losses", "verbosity"}


class _Use(NamedTuple):
    """A use of the handle: its row of the table, what the row is about, and what it found there."""

    row: table.Row
    node: ast.AST
    match: dict[str, ast.AST]


def convert(script: Script) -> None:
    """Note what turns the loop into one with a handle; Refused where that is not certain."""
    uses, starts = [], []
    for name in _names(script):
        qualified = script.qualified(name)
        register = next((row for row in table.REGISTERS if row.call == qualified), None)
        if register is not None:
            script.replace(name, register.becomes, register.reason)
            script.needs["tritonamp"] = "apex's lists are there"
        elif qualified == f"{AMP}.initialize":
            starts.append(name)
        else:
            uses.append(_use(script, name))
    if len(starts) > 1 or (uses and not starts):
        node = uses[0].node if uses else starts[1]
        what = f"`{ast.unparse(node)}` with {len(starts)} calls of amp.initialize in this file"
        raise Refused(node, what, f"one handle for all models and optimizers: {HANDLE}{_OR_APEX}")
    if starts:
        _ApexLoop(script, starts[0], uses).convert()


def _names(script: Script) -> list[ast.Attribute | ast.Name]:
    """Return every ``apex.amp.name``, in order, and drop its imports; Refused for amp alone."""
    imports = [(s, alias) for s in statements(script) for alias in s.names]
    bound = {a.asname or a.name for s, a in imports if imported(s, a) == AMP}
    plain = [n for n in script.nodes if isinstance(getattr(n, "ctx", None), ast.Load)]
    found: list[ast.Attribute | ast.Name] = []
    for node in plain:
        name = script.qualified(node) or ""
        if isinstance(node, ast.Name) and node.id in bound and script.variable(node) is None:
            what = f"`{node.id}` is not imported where it is used"
            raise Refused(node, what, "import it for the whole file")
        if name.startswith(f"{AMP}.") and name.count(".") == 2:
            found.append(node)  # type: ignore[arg-type]
        elif name == AMP and not isinstance(script.parents[node], ast.Attribute):
            raise Refused(node, f"`{ast.unparse(node)}` as a value", "hand the handle over")
    apex = [node for node in plain if script.qualified(node) == "apex"]
    only_amp = all(script.qualified(script.parents[node]) == AMP for node in apex)
    for statement, alias in imports if found else ():
        name = imported(statement, alias)
        binds_apex = isinstance(statement, ast.Import) and alias.asname is None
        if (only_amp and name in ("apex", AMP)) if binds_apex else name.startswith(AMP):
            script.dropped.add(alias)
    return sorted(found, key=script.start)


def _use(script: Script, name: ast.AST) -> _Use:
    """Return the use that ``name`` begins; Refused where the table has none."""
    around = [*script.around(name)][:3]  # a call; of a scaled loss, its item and its block
    for row in table.APEX_ROWS:
        node = around[-1] if row is table.SCALED_BACKWARD else around[0]
        match = row.match(script, node)
        if match is not None and _only_runs_backward(script, match.get("SCALED")):
            return _Use(row, node, match)
    raise Refused(name, f"`{ast.unparse(name)}` has no counterpart", "`--to apex` keeps it")


def _only_runs_backward(script: Script, scaled: ast.AST | None) -> bool:
    """Whether the name of a scaled loss is read for nothing but its backward."""
    return all(
        getattr(script.parents[node], "attr", "") == "backward"
        for node in script.nodes
        if isinstance(node, ast.Name) and node.id == getattr(scaled, "id", None)
        if isinstance(node.ctx, ast.Load)
    )


def _items(node: ast.expr | None) -> list[ast.expr]:
    if node is None or ast.unparse(node) == "None":
        return []
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]


class _ApexLoop:
    """A call of ``amp.initialize``, and everything that ``amp`` is used for."""

    def __init__(self, script: Script, start: ast.AST, uses: list[_Use]) -> None:
        self.script, self.uses, self.amp = script, uses, "amp"
        call, statement = [*script.around(start)][:2]
        if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign | ast.Expr):
            raise Refused(start, "amp.initialize is not a statement of its own")
        self.call, self.statement = call, statement
        self.given: dict[str, ast.expr] = dict(zip(_PARAMETERS, call.args, strict=False))
        self.given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if starred or not {"models"} <= {*self.given} <= {*_PARAMETERS}:
            raise Refused(call, f"`{ast.unparse(call)}`", "name each argument of `enable`")
        self.models = _items(self.given["models"])
        self.optimizers = _items(self.given.get("optimizers"))
        enabled = self.given.get("enabled")
        if isinstance(enabled, ast.Constant) and not enabled.value:
            raise Refused(call, "mixed precision is off here", "a level for `enable`")
        self.enabled = None if isinstance(enabled, ast.Constant) else enabled
        outer = script.parents[statement]
        test = outer.test if isinstance(outer, ast.If) and statement in outer.body else None
        self.switch = Switch(script, self.enabled or test)
        self.scope = script.scope(statement)
        self.scopes = {script.scope(use.node) for use in self.uses}

    def convert(self) -> None:
        """Note all edits."""
        script = self.script
        scales = any(use.row in (table.SCALED_BACKWARD, table.SCALE_LOSS) for use in self.uses)
        if self.optimizers and not scales:
            what = "no `amp.scale_loss` is in this file, so the losses are scaled in another one"
            by_hand = "hand the handle to where the loss is, and `amp.backward(loss)` there"
            raise Refused(self.statement, what, by_hand + _OR_APEX)
        self._choose_name()
        lines = self._enable()
        self._refuse_without_handle()
        gradients.refuse_plain_backwards(script, self.switch)
        for scope in self.scopes:
            self._gradients(scope)
        for use in reversed(self.uses):
            if not script.covers(use.node):  # by a clip of the handle
                use.match.pop("OPTIMIZERS" if len(self.optimizers) == 1 else "", None)
                use.row.edit(script, use.node, use.match, self.amp)
        lead = script.newline + script.indentation(self.statement)
        script.replace(self.statement, lead.join(lines), table.INITIALIZE.reason)
        script.needs["tritonamp"] = "the handle comes from there"

    def _enable(self) -> list[str]:
        """Return the lines in the place of ``amp.initialize``."""
        script, lines = self.script, []
        values = [self.given.get("models"), self.given.get("optimizers")]
        given = [script.segment(o) for o in values if o and ast.unparse(o) != "None"]
        if isinstance(self.statement, ast.Assign):
            target = self.statement.targets[0]
            both = isinstance(target, ast.Tuple) and len(given) == 2
            results = [ast.unparse(one) for one in (target.elts if both else [target])]  # type: ignore[attr-defined]
            if len(results) != len(given) or len(self.statement.targets) > 1:
                raise Refused(self.call, "the results are kept together")
            if results != [ast.unparse(ast.parse(text)) for text in given]:
                lines = [f"{', '.join(results)} = {', '.join(given)}"]
                given = results
        options = self._options()
        given_level = self.given.get("opt_level")
        level = '"O1"' if given_level is None else script.segment(given_level)
        if self.enabled is not None:
            on = objects.in_place(self.enabled)
            if options or objects.changes(script, self.enabled, self.statement):
                what = f"options of the level alone beside `enabled={on}`, or it changes"
                raise Refused(self.call, what, '`enable` in an `if`, with level="O0" in its else')
            level = f"({level})" if " if " in level else level
            level += f' if {on} else "O0"'
        given = given[: 1 + bool(self.optimizers)]  # without an empty list
        arguments = ", ".join([*given, f"level={level}", *options])
        return [*lines, f"{self.amp} = tritonamp.enable({arguments})"]

    def _options(self) -> list[str]:
        """Return keywords of ``enable``; Refused for values that are not known."""
        options = []
        for name, value in self.given.items():
            text = ast.unparse(value)
            plain = value.value if isinstance(value, ast.Constant) else ...
            if name in _NO_OPTIONS or plain is None:
                continue
            if name == "loss_scale" and (isinstance(plain, float | int) or plain == "dynamic"):
                options.append("loss_scale=" + text.replace("'", '"'))
            elif name == "keep_batchnorm_fp32" and plain in (True, False, "True", "False"):
                options.append(f"keep_norms_fp32={plain}")
            elif name == "master_weights" and isinstance(plain, bool):
                options.append(f"master_weights={plain}")
            else:
                what = f"`{name}={text}`: its value is not known here, and apex has its own rules"
                by_hand = "what it means, as loss_scale, keep_norms_fp32 or master_weights"
                raise Refused(self.call, what, by_hand + _OR_APEX)
        return options

    def _choose_name(self) -> None:
        """Find a name that all uses can reach: a variable, one of self, or a global one."""
        script, scope = self.script, self.scope
        owner, others = script.class_of(scope), self.scopes - {scope}
        if owner is not None and others and all(script.class_of(s) is owner for s in others):
            self.amp = f"{scope.args.args[0].arg}.amp"  # type: ignore[attr-defined]
            return
        bound = [b for v, bindings in script.bindings.items() if v.name == "amp" for b in bindings]
        for binding in bound:
            if not isinstance(binding, Import) and not script.stands_in(binding):
                raise Refused(binding, "`amp` is something else, too", "give that another name")
        inside = all(scope in script.around(other) for other in others)
        if inside or not isinstance(scope, Function):
            return
        if objects.times_called(script, scope) > 1:
            what = "several handles, of which other functions would see the last"
            raise Refused(self.statement, what, "return the handle beside model and optimizer")
        first = scope.body[ast.get_docstring(scope) is not None and len(scope.body) > 1]
        script.insert_line(first, "global amp", "other functions use the handle, too")

    def _refuse_without_handle(self) -> None:
        """Refuse uses that also run where ``amp.initialize`` has not."""
        inner: ast.AST = self.statement
        for outer in self.script.around(self.statement):
            if isinstance(outer, ast.If):
                made = Switch(self.script, outer.test)
                for use in self.uses:
                    beside = outer not in self.script.around(use.node)
                    if beside and not made.runs(use.node, on=inner in outer.body):
                        what = f"`{ast.unparse(use.node)}` runs without amp.initialize, too"
                        by_hand = f'the handle always, "O0" without `{ast.unparse(outer.test)}`'
                        raise Refused(use.node, what.replace("\n", " "), by_hand)
            inner = outer

    def _gradients(self, scope: ast.AST) -> None:
        """Mend what meets gradients behind a scaled loss, where apex has unscaled them.

        A clip of all of them to a norm is the handle's, in the step; anything else needs true
        gradients from before its first statement on.
        """
        script = self.script
        roots = [script.root(model) for model in self.models]
        masters = [use.node for use in self.uses if use.row is table.MASTER_PARAMS]
        masters = [node for node in masters if script.scope(node) is scope]
        works: list[ast.AST] = [*masters, *gradients.clips(script, [scope])]
        works = sorted((n for n in works if not self.switch.runs(n, on=False)), key=script.start)
        reads = gradients.reads(script, [scope])
        reads = [node for node in reads if not self.switch.runs(node, on=False)]
        if reads and not works:
            what = f"`{ast.unparse(reads[0])}`: gradients carry the scale until the step"
            raise Refused(reads[0], what, "`amp.unscale_()` before it, after the backward")
        for work in works:
            text = f"`{ast.unparse(work)}`"
            if len(self.optimizers) > 1:
                by_hand = "`amp.unscale_()`, then the gradients of its groups"
                raise Refused(work, f"{text} of one of several optimizers", by_hand)
            items = [item for outer in script.around(work) for item in getattr(outer, "items", [])]
            if any(use.node is item.context_expr for use in self.uses for item in items):
                what = f"{text} in the block, of gradients that still carry the scale"
                raise Refused(work, what, "`amp.clip_grad_norm_(max_norm)`, if it means true ones")
        found = {node: gradients.clip_of_all(script, node, roots) for node in works}
        whole = {node: match for node, match in found.items() if match is not None}
        if all(node in whole or script.parents[node] in whole for node in works) and not reads:
            for node, match in whole.items():
                table.CLIP.edit(script, node, match, self.amp)
        elif works:
            self._unscale_before(works)

    def _unscale_before(self, works: list[ast.AST]) -> None:
        """Note the line that makes gradients true, before the first of several works with them."""
        script = self.script
        first, scope = script.statement(works[0]), script.scope(works[0])
        losses = [u for u in self.uses if "LOSS" in u.match and script.scope(u.node) is scope]
        for work in works:
            if losses[1:] or not {work, *script.around(work)} & {*script.block(first)}:
                what = f"`{ast.unparse(work)}` in another block, or behind several losses"
                raise Refused(work, what, "`amp.unscale_()` before it, behind each backward")
        line = f"{self.amp}.unscale_()  # true gradients"
        self.script.insert_line(first, line, "for gradient work of your own")

"""Names of torch.cuda.amp and torch.cpu.amp, which torch deprecates, and their new ones."""

import ast

from tritonamp.commands.migrate.reading.script import Script

_OLD = {
    f"torch.{device}.amp.{path}": (device, path.split(".")[-1])
    for device in ("cuda", "cpu")
    for path in (
        "autocast", "autocast_mode.autocast", "custom_fwd", "custom_bwd",
        "autocast_mode.custom_fwd", "autocast_mode.custom_bwd",
    )
}  # fmt: skip
_NEW = "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"
AUTOCASTS = (*_NEW, *(name for name, (_, short) in _OLD.items() if short == "autocast"))
_OF_OLD_AUTOCAST = "enabled", "dtype", "cache_enabled"
_OF_AUTOCAST = "device_type", "dtype", "enabled", "cache_enabled"


def options(script: Script, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of an autocast by their names; of the old ones, with the device."""
    name = script.qualified(call.func) or ""
    names = _OF_OLD_AUTOCAST if name in _OLD else _OF_AUTOCAST
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if name in _OLD:
        given["device_type"] = ast.Constant(_OLD[name][0])
    return given


def convert(script: Script) -> None:
    """Note the edits that rename what is left of the deprecated names."""
    for node in script.source.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            old = _OLD.get(script.qualified(node) or "")
            if old is None or script.edits.covers(node):
                continue
            parent = script.source.parents[node]
            plain = isinstance(parent, ast.Call) and not any(
                isinstance(argument, ast.Starred) for argument in parent.args
            )
            if (
                isinstance(parent, ast.Call)
                and parent.func is node
                and plain
                and (old[1] == "autocast" or not parent.args)
            ):
                _rename_call(script, parent, *old)
            elif old[1] != "autocast" and node in getattr(parent, "decorator_list", []):
                new = f'{script.torch()}.amp.{old[1]}(device_type="{old[0]}")'
                script.replace(node, new, _deprecated(old[0]))
            else:
                script.refuse(
                    node,
                    f"`{ast.unparse(node)}`, which torch deprecates, is not called plainly",
                    f"torch.amp.{old[1]} takes the device as well: `functools.partial(torch.amp."
                    f'{old[1]}, "{old[0]}")`',
                )


def _rename_call(script: Script, call: ast.Call, device: str, short: str) -> None:
    reason = _deprecated(device)
    torch = script.torch()
    if short != "autocast":
        given = [f'device_type="{device}"', *(script.edits.text(k) for k in call.keywords)]
        script.replace(call, f"{torch}.amp.{short}({', '.join(given)})", reason)
        return
    named = [f'"{device}"']
    named += [
        f"{name}={script.edits.text(value)}"
        for name, value in zip(_OF_OLD_AUTOCAST, call.args, strict=False)
    ]
    named += [script.edits.text(keyword) for keyword in call.keywords]
    script.replace(call, f"{torch}.autocast({', '.join(named)})", reason)


def _deprecated(device: str) -> str:
    return f"torch deprecates torch.{device}.amp"

"""How texts name the handle, and the arguments with which it was made."""

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple


class Terms(NamedTuple):
    """How texts name the handle, and the arguments with which it was made.

    Attributes:
        handle: expression for the handle; not "amp" if that name is taken.
        takes_modules: whether ``fp32_modules`` and ``fp32_results`` can name modules as texts do.
            ``tritonamp.apex`` has no such arguments, so that its texts name ``amp.heal``.
        arguments: arguments of ``enable``, as texts write them, to those of the user's own call.
    """

    handle: str = "amp"
    takes_modules: bool = True
    arguments: Mapping[str, str] = {}

    def told(self, text: str) -> str:
        """Return a text, written for ``amp = enable(model, ...)``, in these terms."""
        if not self.takes_modules:
            text = re.sub(r"\bfp32_(modules|results)=(\[.*?\])", _heals, text)
        for argument, own in self.arguments.items():
            text = re.sub(rf"\b{re.escape(argument)}", own, text)
        return re.sub(r"\bamp\.(?=\w+\()", f"{self.handle}.", text)


def _heals(match: re.Match[str]) -> str:
    results = ", results=True" if match[1] == "results" else ""
    return "; ".join(f"amp.heal({name!r}{results})" for name in ast.literal_eval(match[2]))


IN_A_LOOP = Terms()
"""Terms of a loop with one model, as READMEs write it."""

"""The text of ``amp.explain``, taken apart as a reader does it."""

import re
from dataclasses import dataclass

from tritonamp.diagnosis.replay.verdicts import VERDICTS

_HEADING = re.compile(
    r"^(?P<kind>[a-z0-9/ ]+), (?P<phase>forward|backward): (?P<where>.*?), "
    r"op (?P<op>\w+)(?: at .*)?$",
    re.MULTILINE,
)
_CAUSE = re.compile(r"^step \S*(?: ?\d+)? skipped \([^)]*\): (?P<cause>[a-z ]+):", re.MULTILINE)
_LINE = r"^  {name}: *(.*)$"


@dataclass(frozen=True)
class Report:
    """Parts of a report; "" where it has none."""

    text: str

    def _found(self, pattern: re.Pattern[str], group: str) -> str:
        found = pattern.search(self.text)
        return found[group] if found else ""

    def _line(self, name: str) -> str:
        found = re.search(_LINE.format(name=name), self.text, re.MULTILINE)
        return found[1] if found else ""

    @property
    def cause(self) -> str:
        """The cause of the skip."""
        return self._found(_CAUSE, "cause")

    @property
    def kind(self) -> str:
        """The kind of fault, a key of ``VERDICTS``."""
        kind = self._found(_HEADING, "kind").replace(" ", "_")
        return kind if kind in VERDICTS else kind.partition("_")[2]  # "silent", "vanished"

    @property
    def phase(self) -> str:
        """Forward or backward."""
        return self._found(_HEADING, "phase")

    @property
    def op(self) -> str:
        """The op to blame."""
        return self._found(_HEADING, "op")

    @property
    def module(self) -> str | None:
        """The module to blame, "" for the model, or None for a place outside of it."""
        where = self._found(_HEADING, "where")
        return (
            None if where == "outside the model" else "" if where.startswith("the model") else where
        )

    @property
    def code(self) -> str:
        """The line of code."""
        return self._line("code")

    @property
    def line(self) -> int:
        """The number of the line to edit, where a value was made that did not survive a cast."""
        maker = re.search(r"op \w+ at \S+:(\d+)\)? was cast", self._line("why"))
        found = maker or re.search(r"op \w+ at \S+:(\d+)$", self.text, re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def claims(self) -> list[str]:
        """Advice of which the report says that it was tried, one at a time."""
        said = re.split(r" \(tried: [^)]*\)(?:; or |\.|$)", self._line("to do"))[:-1]
        return [claim[0].lower() + claim[1:] for claim in said]

    @property
    def advice(self) -> str:
        """The advice of the report, or all of the text where no op is named."""
        return (self._line("to do") or self.text).partition("Tried in vain")[0]

"""What the emulator has to complain about."""

from dataclasses import dataclass


@dataclass
class Finding:
    """Something that a kernel must not do.

    Attributes:
        kind: like "out of bounds".
        kernel: name.
        instruction: its text.
        detail: where it happened first.
        count: how often it happened.
    """

    kind: str
    kernel: str
    instruction: str
    detail: str
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.kernel}: {self.instruction!r}"
        return f"{self.kind}: {where}: {self.detail} ({self.count} times)"


class Findings(dict[tuple[str, str, str], Finding]):
    """Findings by kind, kernel and instruction: each is told once."""

    def note(self, kind: str, kernel: str, instruction: str, detail: str) -> None:
        """Add a finding, or count it again."""
        known = self.setdefault(
            (kind, kernel, instruction), Finding(kind, kernel, instruction, detail, 0)
        )
        known.count += 1

    def kinds(self) -> set[str]:
        """Return what kinds there are."""
        return {finding.kind for finding in self.values()}

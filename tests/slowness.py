"""How slow this machine is. As a program it prints in how many turns CI runs its tests here, at
least: CI looks again after its first tests.
"""

import time

LOOP = 0.011
"""What ``slowness`` has Python do takes as many seconds where tests were marked."""
A_TURN = 0.6
"""CI took 37 minutes at slowness 1, and more than 90 at 2.2."""


def slowness() -> float:
    """Return how many times slower this machine is than the one where tests were marked, or 1."""
    times = []
    for _ in range(3):
        before = time.process_time()
        sum(i * i for i in range(200_000))
        times.append(time.process_time() - before)
    return max(1.0, min(times) / LOOP)


if __name__ == "__main__":
    print(int(slowness() / A_TURN))

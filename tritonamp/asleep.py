"""Which tensors of one ``Amp`` are in host memory. Code that is about to use them asks here."""


class Asleep:
    """The parts of one ``Amp`` that are in host memory.

    Their tensors on the device have no memory, so a kernel that reads one would crash.

    Attributes:
        training: whether masters, optimizer state, gradients and averages are away.
        weights: whether the model's parameters and buffers are away, too.
    """

    def __init__(self) -> None:
        self.training = False
        self.weights = False

    def check_training(self) -> None:
        """Raise RuntimeError if the tensors of training are away."""
        if self.training:
            raise RuntimeError(
                "expected training on its device, got it asleep since amp.sleep(): masters, "
                "optimizer state and gradients are in host memory. Call amp.wake() first"
            )

    def check_weights(self) -> None:
        """Raise RuntimeError if the model's parameters are away."""
        if self.weights:
            raise RuntimeError(
                "expected a model on its device, got one asleep since amp.sleep(weights=True): its "
                "parameters are in host memory. Call amp.wake() first; amp.sleep() without "
                "weights leaves them on the device"
            )

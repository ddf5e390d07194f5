"""Drop-in for the parts of ``apex.contrib`` that training loops use."""

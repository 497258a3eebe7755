"""minirler: reinforcement learning with rubrics for deep-research agents, from scratch.

Read the modules in the order that README.md gives: it is also the order in which they import one
another. Nothing happens at import time.
"""

__version__ = "0.1.0"

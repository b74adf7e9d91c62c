"""What only workers of an elastic job need before their script begins. It imports torch."""

from scalai.patches.hooks import install
from scalai.patches.signals import keep_ending_children, leave_signals_to_the_agent
from scalai.patches.unconnected import watch_first_step
from scalai.runtime.stacks import offer_stacks

__all__ = ["install", "prepare"]


def prepare() -> None:
    """Answer the agent's signals, and watch whether the script is one that can be stopped.
    ``install`` then hooks the frameworks, once the path is that of the script."""
    offer_stacks()
    leave_signals_to_the_agent()
    keep_ending_children()
    watch_first_step()

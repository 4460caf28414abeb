"""ds4: an embeddable local model runtime whose context can be rolled back exactly."""

from __future__ import annotations

from . import errors, events
from .agent.chat import Chat
from .agent.tools import Tool, tool
from .chat_formats import ToolCall
from .compaction.policy import CompactionPolicy
from .engine import Engine, Mark, Session, StreamInfo, Synced
from .sampling import Sampling, Token

__version__ = "0.1.0"
__all__ = [
    "Chat",
    "CompactionPolicy",
    "Engine",
    "Mark",
    "Sampling",
    "Session",
    "StreamInfo",
    "Synced",
    "Token",
    "Tool",
    "ToolCall",
    "errors",
    "events",
    "tool",
]

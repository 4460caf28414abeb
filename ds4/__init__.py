"""ds4: an embeddable local model runtime whose context can be rolled back exactly."""

from __future__ import annotations

from . import errors
from .chat import Chat
from .engine import Engine, Mark, Session, StreamInfo, Synced
from .sampling import Sampling, Token

__version__ = "0.1.0"
__all__ = ["Chat", "Engine", "Mark", "Sampling", "Session", "StreamInfo", "Synced", "Token", "errors"]

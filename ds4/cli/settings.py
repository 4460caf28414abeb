"""What a conversation at the terminal is made with: from the flags, or from the log of one that is resumed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4 import models
from ds4.cli.options import UsageError, add_chat, add_model, add_sampling, given_sampling, policy_values, sampling
from ds4.cli.output import Output
from ds4.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from ds4.agent.bash import Jobs
    from ds4.agent.chat import Chat
    from ds4.agent.tools import Tool
    from ds4.chat_formats import ToolCall
    from ds4.compaction.policy import CompactionPolicy
    from ds4.engine import Engine

AGENT_SYSTEM = "You help with the files in the user's folder. Look with the tools before you answer."
_FIXED = {"system": "--system", "chat_format": "--chat-format", "write": "--write", "bash": "--bash"}
_FIXED |= {"no_span_tools": "--no-span-tools", "effort": "--effort"}


@dataclass(frozen=True)
class Settings:
    """`tools`: the model gets tools at all, for files under `root`. `sampling`, `policy`: what differs from the
    defaults. The system prompt, the format and the tools cannot be changed later: their ids are part of the
    conversation."""

    model: str
    system: str | None = None
    chat_format: str | None = None
    tools: bool = False
    root: str = "."
    write: bool = False
    bash: bool = False
    span_tools: bool = False
    ctx: int | None = None
    max_tokens: int | None = None
    thinking: bool = True
    drop_thinking: bool = False
    effort: str | None = None
    greedy_calls: bool = False
    compact: bool = True
    policy: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,), "system": (str, type(None)), "chat_format": (str, type(None)), "root": (str,),
    "effort": (str, type(None)), "ctx": (int, type(None)), "max_tokens": (int, type(None)),
    "policy": (dict,), "sampling": (dict,),
}  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """The flags of `ds4 chat`, which `ds4 agent` has too."""
    add_chat(parser)
    group = parser.add_argument_group("conversation")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--resume", metavar="ID", help="go on with this conversation; the beginning of its id is enough")
    which.add_argument(
        "--continue", action="store_true", dest="go_on", help="go on with the conversation that was changed last"
    )
    group.add_argument("--memory", action="store_true", help="keep nothing on disk")
    group.add_argument("--no-compact", action="store_true", help="no compaction but by /compact")
    group.add_argument("--background", action="store_true", help="prepare compactions while you think")
    group.add_argument(
        "--policy",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="a field of the compaction policy, such as tail_fraction=0.2 (repeatable; docs/compaction.md lists them)",
    )
    group.add_argument("--effort", metavar="NAME", help="the effort of reasoning, where the chat format has some")
    group.add_argument("--no-thinking", action="store_true", help="the model answers without thinking first")
    group.add_argument(
        "--drop-thinking", action="store_true", help="thinking leaves the context when your next message comes"
    )
    add_sampling(parser)
    add_model(parser, required=False)


def from_args(args: argparse.Namespace, tools: bool, info: Mapping[str, Any] | None) -> Settings:
    """What the flags say; with the `info` of a log, on top of what the conversation was begun with. Raises UsageError
    for flags that contradict."""
    if args.no_compact and (args.policy or args.background):
        raise UsageError("--no-compact leaves nothing for --policy or --background to set: leave one out")
    policy = policy_values([*args.policy, *(["background=true"] if args.background else [])])
    given: dict[str, Any] = {name: value for name in ("ctx", "max_tokens") if (value := getattr(args, name))}
    given |= {"thinking": False} if args.no_thinking else {}
    given |= {"drop_thinking": True} if args.drop_thinking else {}
    given |= {"greedy_calls": True} if args.greedy_calls else {}
    given |= {"compact": not args.no_compact} if args.no_compact or policy else {}
    if args.model is not None:
        given["model"] = _lasting(args.model)
    if args.root is not None:
        if not os.path.isdir(args.root):
            raise UsageError(f"--root {args.root}: there is no such folder")
        given["root"] = os.path.realpath(args.root)
    if info is None:
        found = _new(args, tools, given)
    else:
        for name, flag in _FIXED.items():
            if getattr(args, name):
                raise UsageError(f"{flag} belongs to the start of a conversation; begin a new one for it")
        found = replace(from_info(info), **given)
    found = replace(found, policy={**found.policy, **policy}, sampling={**found.sampling, **given_sampling(args)})
    sampling(found.model, found.sampling)
    return found


def _new(args: argparse.Namespace, tools: bool, given: Mapping[str, Any]) -> Settings:
    if "model" not in given:
        raise UsageError("say which model with -m, or go on with a conversation: --resume ID, or --continue")
    system = args.system if args.system is not None or not tools else AGENT_SYSTEM
    made = Settings(given["model"], system, args.chat_format, tools, os.path.realpath("."), effort=args.effort)
    if tools:
        made = replace(made, write=args.write, bash=args.bash, span_tools=not args.no_span_tools)
    return replace(made, **given)


def from_info(info: Mapping[str, Any]) -> Settings:
    """What the log of a conversation says. Raises StoreError when another kind of program has made it."""
    about = info.get("about")
    about = about if isinstance(about, dict) else {}
    names = {one.name for one in fields(Settings)}
    if "model" not in about and not info.get("tools"):  # made by a program, but it has all that a chat needs
        about = {name: info.get(name) for name in ("model", "system", "chat_format", "effort")}
    if set(about) - names or not all(isinstance(about[name], _TYPES.get(name, (bool,))) for name in about):
        raise StoreError("the log does not say how the conversation was made in a way that this version knows.")
    if "model" not in about:
        raise StoreError("the conversation was made by a program with tools of its own: go on with it there.")
    return Settings(**about)


def _lasting(model: str) -> str:
    """A model's name, or its path so that it is found from any folder."""
    return os.path.realpath(model) if model not in models.names() and os.path.exists(model) else model


@dataclass
class Opened:
    """An open conversation. `saved`: the event of its log up to which the snapshot goes; `jobs`: its commands in the
    background."""

    chat: Chat
    settings: Settings
    jobs: Jobs | None = None
    saved: int = 0


class Opener:
    """Makes chats from settings, on one engine. `allow` as for Chat."""

    def __init__(self, engine: Engine, out: Output, allow: Callable[[ToolCall, str], bool] | None) -> None:
        self.engine, self.out, self.allow = engine, out, allow

    def open(self, settings: Settings, store: Path | None = None) -> Opened:
        """A chat; with a store that holds a conversation, the one that goes on with it. Raises what Chat raises."""
        from ds4.agent.chat import Chat

        tools, jobs = self._tools(settings)
        chat = Chat(
            self.engine,
            ctx=settings.ctx,
            system=settings.system,
            tools=tools,
            allow=self.allow,
            chat_format=settings.chat_format,
            sampling=sampling(settings.model, settings.sampling),
            max_tokens=settings.max_tokens,
            policy=self._policy(settings),
            store=store,
            thinking=settings.thinking,
            drop_thinking=settings.drop_thinking,
            effort=settings.effort,
            greedy_calls=settings.greedy_calls,
            span_tools=settings.tools and settings.span_tools,
            notes=lambda: [note] if jobs is not None and (note := jobs.note()) is not None else [],
            about=asdict(settings),
        )
        return Opened(chat, settings, jobs, chat.transcript.seq if chat.session.pos else 0)

    def checked(self, settings: Settings) -> Settings:
        """The settings that this model and its context can do; what they cannot is said in a line."""
        from ds4.agent.chat import calls_tools
        from ds4.compaction.policy import MIN_CTX

        if (
            settings.tools and calls_tools(self.engine, settings.chat_format) is False
        ):  # of None Chat says what is wrong
            self.out.note(f"the chat format of {settings.model} has no tool calls: the model gets no tools")
            settings = replace(settings, tools=False, write=False, bash=False, span_tools=False)
            if settings.system == AGENT_SYSTEM:
                settings = replace(settings, system=None)
        if settings.compact and self._policy(settings) is None:
            ctx = settings.ctx or self.engine.ctx
            self.out.note(f"a context of {ctx} tokens is too small to compact itself: that takes {MIN_CTX}")
        return settings

    def _policy(self, settings: Settings) -> CompactionPolicy | None:
        """None where compactions are not wanted, or where nothing is said about them and the context is too small."""
        from ds4.compaction.policy import MIN_CTX, CompactionPolicy

        too_small = not settings.policy and (settings.ctx or self.engine.ctx) < MIN_CTX
        return CompactionPolicy.from_mapping(settings.policy) if settings.compact and not too_small else None

    def _tools(self, settings: Settings) -> tuple[list[Tool], Jobs | None]:
        if not settings.tools:
            return [], None
        from ds4.agent.bash import Jobs
        from ds4.agent.builtin import builtin_tools
        from ds4.agent.sandbox import Root

        try:
            root = Root(settings.root)
        except ArgumentError as error:
            raise ArgumentError(f"{error} Say where the files are now: `ds4 agent --resume ID --root DIR`.") from None
        jobs = Jobs(root) if settings.bash else None
        return builtin_tools(root, write=settings.write, bash=settings.bash, jobs=jobs), jobs

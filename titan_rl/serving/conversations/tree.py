"""Tree of a conversation's turns. It finds the turn that a history extends, so no sampled token is tokenized again."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof
from typing import Any, Generic, TypeVar, cast

from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import RequestError
from titan_rl.core.plain_data import snapshot
from titan_rl.rollout.renderer.types import Renderer, Tools, renderable
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.identity import Identity, identity_of, identity_of_tokens, identity_of_tools
from titan_rl.types import Completion

T = TypeVar("T", bound=Hashable)


class Prefixes(Generic[T]):
    """Finds the longest of many sequences that are prefixes of another sequence, in one pass over that sequence.

    Example:

        prefixes = Prefixes[str]()
        prefixes.add([5, 6], "short")
        prefixes.add([5, 6, 7], "long")
        prefixes.longest([5, 6, 7, 8])      # ["long"]
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._found: dict[tuple[int, bytes], list[T]] = {}

    def add(self, token_ids: Sequence[int], value: T) -> None:
        key = len(token_ids), blake2b(_packed(token_ids), digest_size=16).digest()
        if key not in self._found:
            self._found[key] = []
            if len(token_ids) not in self._lengths:
                insort(self._lengths, len(token_ids))
        self._found[key].append(value)

    def longest(self, token_ids: Sequence[int]) -> Sequence[T]:
        """Return the values of the longest sequence that is a prefix of `token_ids`; none if there is none."""
        running, position = blake2b(digest_size=16), 0
        found: Sequence[T] = ()
        for length in self._lengths:
            if length > len(token_ids):
                break
            running.update(_packed(token_ids[position:length]))
            position = length
            found = self._found.get((length, running.digest()), found)
        return found


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


_IN_TOKENS = b"tokens"
_TOKEN_BYTES = 36  # of an integer and its reference in a list
_TURN_BYTES = 256


@dataclass(slots=True, eq=False)
class TurnNode:
    """Completion, with the turn that its prompt extends.

    Attributes:
        index: Number of turns that were added to the tree before it.
        parent: Turn with whose prompt and completion its prompt begins; None if the prompt was rendered whole.
        message: Message of the completion, as the client received it.
        node: Node of that message.
    """

    index: int
    parent: TurnNode | None
    added_token_ids: Sequence[int]  # what its prompt adds to the parent's prompt and completion
    completion: Completion
    message: Message
    node: MessageNode = field(repr=False)
    children: list[TurnNode] = field(default_factory=list["TurnNode"], repr=False)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Whole prompt of the turn.  # [num_prompt_tokens]"""
        line: list[TurnNode] = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        token_ids = list(line.pop().added_token_ids)
        for node in reversed(line):
            assert node.parent is not None
            token_ids += node.parent.completion.token_ids
            token_ids += node.added_token_ids
        return token_ids

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion of the turn.  # [num_tokens]"""
        return [*self.prompt_token_ids, *self.completion.token_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Tokens to generate from, and the messages at whose end `ConversationTree.add` records the completion.

    Attributes:
        parent: Turn with whose prompt and completion `token_ids` begin exactly; None if the prompt was rendered whole.
    """

    token_ids: Sequence[int]  # [num_prompt_tokens]
    parent: TurnNode | None
    added_token_ids: Sequence[int] = field(repr=False)  # tokens after the parent's, or all
    root: bytes = field(repr=False)  # identity of the offered tools, with which the prompt begins
    after: MessageNode | None = field(repr=False)  # reply of the last recorded turn; None if there is none
    new_messages: Sequence[NewMessage] = field(repr=False)  # messages after it


@dataclass(frozen=True, slots=True)
class NewMessage:
    """Message that a tree may keep.

    Args:
        message: Private copy of the message.
        num_bytes: Approximate size in memory.
    """

    identity: Identity
    message: Message
    num_bytes: int

    @classmethod
    def of(cls, identity: Identity, message: Message) -> NewMessage:
        kept = snapshot(message)
        return cls(identity, kept, _bytes_of(kept))


class MessageNode:
    """Message in a tree of conversations, with the messages that follow it in one conversation or another.

    Attributes:
        message: Message; None in the root, before the first message.
        turns: Turns whose reply this message is. There are several if they say the same.
    """

    __slots__ = ("children", "message", "parent", "turns")

    def __init__(self, message: Message | None = None, parent: MessageNode | None = None) -> None:
        self.message = message
        self.parent = parent
        self.turns: list[TurnNode] = []
        self.children: dict[bytes, dict[bytes | None, MessageNode]] = {}  # by digest and reasoning of the message

    def same(self, identity: Identity) -> Iterable[MessageNode]:
        """Return the children that are the same message. A message without reasoning equals those that differ only in
        having reasoning."""
        if (same := self.children.get(identity.digest)) is None:
            return ()
        if identity.reasoning is None:
            return tuple(same.values())
        return (same[identity.reasoning],) if identity.reasoning in same else ()

    def child(self, new: NewMessage) -> tuple[MessageNode, int]:
        """Return the child of a message, and the number of bytes that this adds. Creates it if necessary."""
        same = self.children.setdefault(new.identity.digest, {})
        if new.identity.reasoning in same:
            return same[new.identity.reasoning], 0
        node = same[new.identity.reasoning] = MessageNode(new.message, self)
        return node, new.num_bytes


@dataclass(frozen=True, slots=True)
class Style:
    """Deviations from the usual rendering of a prompt.

    Args:
        renderer: Replaces the renderer of the tree.
        key: Distinguishes prompts of this renderer from others.
        prefill: Tokens of the beginning of the reply, given by the client. The prompt ends with them.
    """

    renderer: Renderer | None = None
    key: bytes = b""
    prefill: Sequence[int] = ()


USUAL = Style()


class ConversationTree:
    """Conversations of one episode or client, by their messages, and the turns in them.

    A client sends the whole history with each request. `prompt` finds the longest recorded conversation that the
    history continues (see `conversations/identity.py` for the comparison of messages), and tokenizes only new messages.
    If the history differs somewhere, it continues from the last turn before the difference, as a branch.

    If two turns have the same history and say the same, as retries and siblings may, the turn with the fewest
    continuations is chosen, and among these the latest.

    The tree belongs to one event loop. Only `prompt` may be called in another thread, one call at a time.
    Finding a turn takes one look-up per message.

    Example:

        tree = ConversationTree(renderer)
        prompt = tree.prompt([{"role": "user", "content": "Sort: b a"}])
        turn = tree.add(prompt, completion, {"role": "assistant", "content": "a b"})
        more = tree.prompt([{"role": "user", "content": "Sort: b a"}, turn.message, {"role": "user", "content": "c?"}])
        more.parent is turn                                                 # True
        more.token_ids[: len(turn.token_ids)] == turn.token_ids             # True

    Args:
        renderer: Converts messages to tokens. If its `bridge_to_next_turn` cannot extend a turn, the conversation is
            rendered whole. Without a renderer, all conversations must be given as tokens.

    Attributes:
        num_bytes: Approximate memory of the tree.
    """

    def __init__(self, renderer: Renderer | None) -> None:
        self.num_bytes = 0
        self._renderer = renderer
        self._prefixes = Prefixes[TurnNode]()
        self._num_in_prefixes = 0  # number of turns, from the first, that are in it
        self._roots: dict[bytes, MessageNode] = {}  # by the offered tools, which are part of the beginning of a prompt
        self._turns: list[TurnNode] = []

    @property
    def turns(self) -> Sequence[TurnNode]:
        """Turns in the order in which they were added."""
        return self._turns

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None, style: Style = USUAL) -> Prompt:
        """Make the prompt for the next message. Does not change the tree, so prompts may remain unused.

        Args:
            messages: Whole conversation. Messages that are new are rendered as given here.

        Raises:
            RequestError: There are no messages, or the renderer refuses them.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation has at least one")
        identities = [identity_of(message) for message in messages]
        root = identity_of_tools(tools) + style.key
        renderer, prefill = style.renderer or self._renderer, list(style.prefill)
        turn, known = self._find(root, identities)
        after = None if turn is None else turn.node
        rest = list(map(NewMessage.of, identities[known:], messages[known:]))
        if turn is not None:
            so_far = turn.token_ids
            token_ids = _extend(renderer, turn, messages[known:], tools)
            if token_ids[: len(so_far)] == so_far:
                token_ids += prefill
                return Prompt(token_ids, turn, token_ids[len(so_far) :], root, after, rest)
        token_ids = _render(renderer, messages, tools) + prefill
        return Prompt(token_ids, None, token_ids, root, after, rest)

    def prompt_of_tokens(self, token_ids: Sequence[int], show: Callable[[Sequence[int]], str]) -> Prompt:
        """Make the prompt of a client that keeps the tokens itself. It extends the longest turn whose prompt and
        completion are a prefix of it; see `prompt`.

        Args:
            show: Returns the text of tokens, for the transcript.
        """
        for turn in self._turns[self._num_in_prefixes :]:
            self._prefixes.add(turn.token_ids, turn)
        self._num_in_prefixes = len(self._turns)
        parent = min(self._prefixes.longest(token_ids), key=_continuation_order, default=None)
        added = list(token_ids[0 if parent is None else len(parent.token_ids) :])
        new_messages = (
            [NewMessage.of(identity_of_tokens(added), {"role": "user", "content": show(added)})] if added else []
        )
        after = None if parent is None else parent.node
        return Prompt(list(token_ids), parent, added, _IN_TOKENS, after, new_messages)

    def add(self, prompt: Prompt, completion: Completion, message: Message) -> TurnNode:
        """Record a completion of a prompt. Several completions of one prompt are siblings.

        Args:
            message: The completion as the client receives it, with everything that it may send back, such as ids of
                tool calls.
        """
        node = prompt.after or self._roots.setdefault(prompt.root, MessageNode())
        reply = NewMessage.of(identity_of(message), message)
        for new in (*prompt.new_messages, reply):
            node, num_bytes = node.child(new)
            self.num_bytes += num_bytes
        self.num_bytes += _TURN_BYTES + _TOKEN_BYTES * (len(prompt.added_token_ids) + 2 * len(completion.token_ids))
        parent = prompt.parent
        turn = TurnNode(len(self._turns), parent, prompt.added_token_ids, completion, reply.message, node)
        self._turns.append(turn)
        node.turns.append(turn)
        if parent is not None:
            parent.children.append(turn)
        return turn

    def branches(self) -> list[list[TurnNode]]:
        """Divide all turns into lists in which each turn is the parent of the next. The first child of a turn continues
        the list of its parent; other children begin new lists. The lists are sorted by their last turn."""
        of_turn: list[list[TurnNode]] = []  # by the turn's index; a parent's is less than its children's
        branches: list[list[TurnNode]] = []
        for turn in self._turns:
            if turn.parent is not None and turn.parent.children[0] is turn:
                branch = of_turn[turn.parent.index]
            else:
                branches.append(branch := [])
            branch.append(turn)
            of_turn.append(branch)
        return sorted(branches, key=lambda branch: branch[-1].index)

    def transcript(self) -> list[Message]:
        """Return every message that led to a turn, and every reply, each once: one branch after another, each from
        where it differs. The last reply is last."""
        visited: set[MessageNode] = set()
        messages: list[Message] = []
        for branch in self.branches():
            new: list[Message] = []
            for turn in reversed(branch):
                node = turn.node
                while node.message is not None and node.parent is not None and node not in visited:
                    visited.add(node)
                    new.append(node.message)
                    node = node.parent
            messages += reversed(new)
        return messages

    def _find(self, root: bytes, identities: Sequence[Identity]) -> tuple[TurnNode | None, int]:
        """Find the last turn of the longest recorded conversation that these messages continue, and the number of
        messages up to its reply."""
        found: tuple[TurnNode | None, int] = None, 0
        nodes = [self._roots[root]] if root in self._roots else []
        for number, identity in enumerate(identities, 1):
            nodes = [child for node in nodes for child in node.same(identity)]
            if turns := [turn for node in nodes for turn in node.turns]:
                found = min(turns, key=_continuation_order), number
            elif not nodes:
                break
        return found


def _extend(
    renderer: Renderer | None, turn: TurnNode, new_messages: Sequence[Message], tools: Tools | None
) -> list[int]:
    """Return the tokens of a turn and of the messages after it; none if the renderer cannot extend it."""
    assert renderer is not None
    try:
        bridged = renderer.bridge_to_next_turn(
            turn.prompt_token_ids,
            list(turn.completion.token_ids),
            renderable(new_messages),
            tools=None if tools is None else list(tools),
        )
    except Exception:  # a template may refuse these messages alone but accept the whole conversation
        return []
    return [] if bridged is None else list(bridged.token_ids)


def _render(renderer: Renderer | None, messages: Sequence[Message], tools: Tools | None) -> list[int]:
    if renderer is None:
        raise RequestError("there is no renderer for messages")
    try:
        return list(
            renderer.render_ids(
                renderable(messages), tools=None if tools is None else list(tools), add_generation_prompt=True
            )
        )
    except Exception as error:  # a template may raise anything
        raise RequestError(f"messages cannot be rendered for this model: {summary(error)}") from error


def _continuation_order(turn: TurnNode) -> tuple[int, int]:
    return len(turn.children), -turn.index


def _bytes_of(value: Any) -> int:
    if isinstance(value, str):  # most values; the check of an abstract class takes longer
        return getsizeof(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return sum((_bytes_of(key) + _bytes_of(item) for key, item in items), _TURN_BYTES)
    if isinstance(value, list):
        return sum(map(_bytes_of, cast("list[Any]", value)), 64)
    return getsizeof(value)

"""Tree of a conversation's turns: finds the turn that a history extends, so that nothing sampled is tokenized again."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof
from typing import Any, Generic, TypeVar, cast

from titan_rl.core.calls.plain import snapshot
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer.types import Renderer, Tools, renderable
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.identity import Identity, identity_of, identity_of_tokens, identity_of_tools
from titan_rl.types import Completion

T = TypeVar("T", bound=Hashable)


class Prefixes(Generic[T]):
    """Finds the longest of many sequences that another begins with, in one pass over that.

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
        """The values of the longest sequence that `token_ids` begins with; none where there is none."""
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
_TOKEN_BYTES = 36  # of an integer and its place in a list
_TURN_BYTES = 256


@dataclass(slots=True, eq=False)
class TurnNode:
    """One completion and where it stands.

    Attributes:
        index: How many turns of the tree were added before it.
        parent: The turn with whose prompt and completion its prompt begins; None where the prompt was rendered whole.
        message: What the completion says, as the client was given it.
        place: Where that stands in the conversation.
    """

    index: int
    parent: TurnNode | None
    added_token_ids: Sequence[int]  # what its prompt adds to the parent's prompt and completion
    completion: Completion
    message: Message
    place: Place = field(repr=False)
    children: list[TurnNode] = field(default_factory=list["TurnNode"], repr=False)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The whole prompt.  # [num_prompt_tokens]"""
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
        """Prompt and completion.  # [num_tokens]"""
        return [*self.prompt_token_ids, *self.completion.token_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Tokens to generate from, and the place where `ConversationTree.add` records the completion.

    Attributes:
        parent: The turn with whose prompt and completion `token_ids` begin, to the bit; None where all of it was
            rendered.
    """

    token_ids: Sequence[int]  # [num_prompt_tokens]
    parent: TurnNode | None
    added_token_ids: Sequence[int] = field(repr=False)  # those behind the parent's, or all
    root: bytes = field(repr=False)  # of the tools that it begins with
    after: Place | None = field(repr=False)  # how far the tree knows the conversation, if at all
    new_messages: Sequence[NewMessage] = field(repr=False)  # the rest of it


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message that a tree may keep.

    Args:
        message: Nobody else's.
        num_bytes: About what it takes up in memory.
    """

    identity: Identity
    message: Message
    num_bytes: int

    @classmethod
    def of(cls, identity: Identity, message: Message) -> NewMessage:
        kept = snapshot(message)
        return cls(identity, kept, _bytes_of(kept))


class Place:
    """A message in a conversation: what came before it, and what came after it in one conversation or another.

    Attributes:
        message: None in the place before the first.
        turns: Those whose reply it is; several, where they say the same.
    """

    __slots__ = ("before", "message", "next", "turns")

    def __init__(self, message: Message | None = None, before: Place | None = None) -> None:
        self.message = message
        self.before = before
        self.turns: list[TurnNode] = []
        self.next: dict[bytes, dict[bytes | None, Place]] = {}  # by digest and reasoning of the next message

    def goes_on_with(self, identity: Identity) -> Iterable[Place]:
        """Places of the same message. One without reasoning is the same as any that only has reasoning besides."""
        if (same := self.next.get(identity.digest)) is None:
            return ()
        if identity.reasoning is None:
            return tuple(same.values())
        return (same[identity.reasoning],) if identity.reasoning in same else ()

    def enter(self, new: NewMessage) -> tuple[Place, int]:
        """Its place, and the bytes that are new with it."""
        same = self.next.setdefault(new.identity.digest, {})
        if new.identity.reasoning in same:
            return same[new.identity.reasoning], 0
        place = same[new.identity.reasoning] = Place(new.message, self)
        return place, new.num_bytes


@dataclass(frozen=True, slots=True)
class Style:
    """Deviations from the usual rendering of a prompt.

    Args:
        renderer: Replaces the renderer of the tree.
        key: Tells prompts of this renderer from those of others.
        begun: Of a reply that the client has begun itself; the prompt ends with it.
    """

    renderer: Renderer | None = None
    key: bytes = b""
    begun: Sequence[int] = ()


_USUAL = Style()


class ConversationTree:
    """The conversations of one episode, by their messages, and the turns in them.

    A client sends the whole history with each request. `prompt` finds the longest recorded conversation that it goes on
    from (what is the same message: `conversations/identity.py`), and tokenizes what is new. A history that differs
    somewhere goes on from the last turn before that, and is a branch of it.

    Where two turns have the same history and say the same, as retries and siblings may, a client goes on from the one
    that was gone on from least, and of these from the latest.

    The tree belongs to one event loop, but for `prompt`, which may be called in a thread meanwhile, one call at a time.
    Finding a place costs one look at each message.

    Example:

        tree = ConversationTree(renderer)
        prompt = tree.prompt([{"role": "user", "content": "Sort: b a"}])
        turn = tree.add(prompt, completion, {"role": "assistant", "content": "a b"})
        more = tree.prompt([{"role": "user", "content": "Sort: b a"}, turn.message, {"role": "user", "content": "c?"}])
        more.parent is turn                                                 # True
        more.token_ids[: len(turn.token_ids)] == turn.token_ids             # True

    Args:
        renderer: Where its `bridge_to_next_turn` cannot extend a turn, the conversation is rendered whole. Without one
            there are conversations in tokens alone.

    Attributes:
        num_bytes: About what it keeps in memory.
    """

    def __init__(self, renderer: Renderer | None) -> None:
        self.num_bytes = 0
        self._renderer = renderer
        self._prefixes = Prefixes[TurnNode]()
        self._num_in_prefixes = 0  # turns, the first ones
        self._roots: dict[bytes, Place] = {}  # by the tools offered, which are part of what a prompt begins with
        self._turns: list[TurnNode] = []

    @property
    def turns(self) -> Sequence[TurnNode]:
        """In the order in which they were added."""
        return self._turns

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None, style: Style = _USUAL) -> Prompt:
        """The prompt for the next message. The tree is as before: any number may be asked for, and used or not.

        Args:
            messages: The whole conversation. What is new in it is rendered as it stands here.

        Raises:
            RequestError: There is no message, or the renderer refuses them.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation has at least one")
        identities = [identity_of(message) for message in messages]
        root = identity_of_tools(tools) + style.key
        renderer, begun = style.renderer or self._renderer, list(style.begun)
        turn, after, known = self._find(self._roots.get(root), identities)
        rest = list(map(NewMessage.of, identities[known:], messages[known:]))
        if turn is not None:
            so_far = turn.token_ids
            token_ids = _extend(renderer, turn, messages[known:], tools)
            if token_ids[: len(so_far)] == so_far:
                token_ids += begun
                return Prompt(token_ids, turn, token_ids[len(so_far) :], root, after, rest)
        token_ids = _render(renderer, messages, tools) + begun
        return Prompt(token_ids, None, token_ids, root, after, rest)

    def prompt_of_tokens(self, token_ids: Sequence[int], show: Callable[[Sequence[int]], str]) -> Prompt:
        """The prompt of a client that keeps the tokens itself. It extends the longest turn whose prompt and completion
        it begins with; see `prompt`.

        Args:
            show: The text of tokens, for the transcript.
        """
        for turn in self._turns[self._num_in_prefixes :]:
            self._prefixes.add(turn.token_ids, turn)
        self._num_in_prefixes = len(self._turns)
        parent = min(self._prefixes.longest(token_ids), key=_first_to_go_on_from, default=None)
        added = list(token_ids[0 if parent is None else len(parent.token_ids) :])
        said = [NewMessage.of(identity_of_tokens(added), {"role": "user", "content": show(added)})] if added else []
        after = self._roots.get(_IN_TOKENS) if parent is None else parent.place
        return Prompt(list(token_ids), parent, added, _IN_TOKENS, after, said)

    def add(self, prompt: Prompt, completion: Completion, message: Message) -> TurnNode:
        """Record what was sampled from a prompt. One prompt may be added to often: siblings.

        Args:
            message: The completion as the client is given it, with all that a client may send back: ids of tool calls.
        """
        place = prompt.after or self._roots.setdefault(prompt.root, Place())
        reply = NewMessage.of(identity_of(message), message)
        for new in (*prompt.new_messages, reply):
            place, num_bytes = place.enter(new)
            self.num_bytes += num_bytes
        self.num_bytes += _TURN_BYTES + _TOKEN_BYTES * (len(prompt.added_token_ids) + 2 * len(completion.token_ids))
        parent = prompt.parent
        turn = TurnNode(len(self._turns), parent, prompt.added_token_ids, completion, reply.message, place)
        self._turns.append(turn)
        place.turns.append(turn)
        if parent is not None:
            parent.children.append(turn)
        return turn

    def branches(self) -> list[list[TurnNode]]:
        """All turns, each in one list, where each is the parent of the next. Of the children of a turn the first is in
        its list, and others begin lists of their own. The list that ended last is last."""
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
        """Every message that led to a turn, and every reply, each once: one branch after the other, a branch from where
        it differs. The last reply is last."""
        told: set[Place] = set()
        messages: list[Message] = []
        for branch in self.branches():
            new: list[Message] = []
            for turn in reversed(branch):
                place = turn.place
                while place.message is not None and place.before is not None and place not in told:
                    told.add(place)
                    new.append(place.message)
                    place = place.before
            messages += reversed(new)
        return messages

    def _find(self, root: Place | None, identities: Sequence[Identity]) -> tuple[TurnNode | None, Place | None, int]:
        """The last turn of the longest recorded conversation that these messages go on from, its place, and how many
        messages lead there."""
        found: tuple[TurnNode | None, Place | None, int] = None, root, 0
        places = [] if root is None else [root]
        for number, identity in enumerate(identities, 1):
            places = [after for place in places for after in place.goes_on_with(identity)]
            if not places:
                break
            if turns := [(turn, place) for place in places for turn in place.turns]:
                found = (*min(turns, key=lambda pair: _first_to_go_on_from(pair[0])), number)
        return found


def _extend(
    renderer: Renderer | None, turn: TurnNode, new_messages: Sequence[Message], tools: Tools | None
) -> list[int]:
    """The tokens of a turn and of what comes after it; none where the renderer cannot extend it."""
    assert renderer is not None
    try:
        bridged = renderer.bridge_to_next_turn(
            turn.prompt_token_ids,
            list(turn.completion.token_ids),
            renderable(new_messages),
            tools=None if tools is None else list(tools),
        )
    except Exception:  # a template may refuse these messages alone, and take the conversation
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


def _first_to_go_on_from(turn: TurnNode) -> tuple[int, int]:
    return len(turn.children), -turn.index


def _bytes_of(value: Any) -> int:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return sum((_bytes_of(key) + _bytes_of(item) for key, item in items), _TURN_BYTES)
    if isinstance(value, list):
        return sum(map(_bytes_of, cast("list[Any]", value)), 64)
    return getsizeof(value)

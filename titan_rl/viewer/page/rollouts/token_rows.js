// The tokens of a rollout's record in one row, each with all that is known about it.

/**
 * Segments of tokens, in order: for each turn the prompt tokens that no earlier turn has, then the completion.
 *
 * @returns [{kind: "prompt" | "completion", turn, tokens, kept}]. `kept` is null, or the number of tokens that remain of the previous
 *   turn's context if that is not wholly part of this one. A token is {at, position, id, text, turn, part, logprob, version, trained,
 *   advantage}: `at` is its index in all segments, `position` its index in the turn's context, and null is an unknown value.
 */
export function segments(record) {
  const found = [];
  let at = 0;
  let context = 0; // tokens of the previous turn, including its completion
  (record.turns ?? []).forEach((turn, number) => {
    const tokens = turn.tokens;
    if (!tokens) return;
    const shared = tokens.shared ?? 0;
    const row = (part, first, more) => (part.ids ?? []).map((id, i) => ({
      at: at + i, position: first + i, id, text: part.text?.[i] ?? null, turn: number, logprob: null, version: null, trained: false, advantage: null, ...more(i),
    }));
    const prompt = row(tokens.prompt ?? {}, shared, () => ({ part: "prompt" }));
    at += prompt.length;
    const known = knownOf(record, turn, tokens);
    const completion = row(tokens.completion ?? {}, shared + prompt.length, i => ({ part: "completion", ...known(i) }));
    at += completion.length;
    const kept = number > 0 && shared < context ? { kept: shared, of: context } : null;
    if (prompt.length || kept) found.push({ kind: "prompt", turn: number, tokens: prompt, kept });
    found.push({ kind: "completion", turn: number, tokens: completion, kept: null });
    context = shared + prompt.length + completion.length;
  });
  return found;
}

/** Whether each turn has its tokens. */
export function hasTokens(record) {
  return (record.turns ?? []).some(turn => turn.tokens);
}

function knownOf(record, turn, tokens) {
  const { logprobs } = tokens.completion ?? {};
  const versions = (turn.version_spans ?? []).flatMap(([version, length]) => Array(length).fill(version));
  const trained = tokens.trained ?? null;
  const advantages = tokens.advantages ?? record.advantage ?? null;
  return i => ({
    logprob: logprobs?.[i] ?? null,
    version: versions[i] ?? null,
    trained: Array.isArray(trained) ? trained[i] ?? null : trained,
    advantage: Array.isArray(advantages) ? advantages[i] ?? null : advantages,
  });
}

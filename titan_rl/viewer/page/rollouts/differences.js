// The words of a text that another text lacks: the shortest edit script between them (Myers), word by word.

const MOST_EDITS = 400; // with more edits, texts count as completely different

/** Pieces of `text` as [text, different], where `different` says that `other` lacks the piece. */
export function differences(text, other) {
  if (text === other) return [[text, false]];
  const [words, others] = [text, other].map(one => one.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? []);
  let start = 0;
  while (start < words.length && start < others.length && words[start] === others[start]) start++;
  let end = 0;
  while (end < Math.min(words.length, others.length) - start && words.at(-1 - end) === others.at(-1 - end)) end++;
  const middle = words.slice(start, words.length - end);
  const same = kept(middle, others.slice(start, others.length - end));
  return joined([
    ...words.slice(0, start).map(word => [word, false]),
    ...middle.map((word, i) => [word, !same.has(i)]),
    ...words.slice(words.length - end).map(word => [word, false]),
  ]);
}

/** Indices of the words that remain in the shortest edit from `words` to `others`. */
function kept(words, others) {
  if (!words.length || !others.length) return new Set();
  const trace = [];
  let furthest = new Map([[1, 0]]);
  for (let edits = 0; edits <= Math.min(MOST_EDITS, words.length + others.length); edits++) {
    trace.push(new Map(furthest));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
      let x = down ? furthest.get(k + 1) ?? 0 : (furthest.get(k - 1) ?? 0) + 1;
      while (x < words.length && x - k < others.length && words[x] === others[x - k]) x++;
      furthest.set(k, x);
      if (x >= words.length && x - k >= others.length) return walkBack(trace, words.length, others.length);
    }
  }
  return new Set();
}

function walkBack(trace, x, y) {
  const same = new Set();
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const furthest = trace[edits];
    const k = x - y;
    const down = k === -edits || (k !== edits && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
    const before = down ? k + 1 : k - 1;
    const [fromX, fromY] = [furthest.get(before) ?? 0, (furthest.get(before) ?? 0) - before];
    while (x > fromX && y > fromY) {
      x--;
      y--;
      same.add(x);
    }
    if (edits > 0) [x, y] = [fromX, fromY];
  }
  return same;
}

function joined(pieces) {
  const found = [];
  for (const [text, different] of pieces) {
    if (found.length && found.at(-1)[1] === different) found.at(-1)[0] += text;
    else found.push([text, different]);
  }
  return found;
}

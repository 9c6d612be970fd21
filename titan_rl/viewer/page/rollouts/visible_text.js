// Characters that a reader cannot see, or that change how text around them looks, are shown by name.
import { h } from "viewer/dom";

const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const NAMES = new Map(Object.entries({
  "\u007f": "DEL", "\u00ad": "SHY", "\u061c": "ALM", "\u115f": "HCF", "\u1160": "HJF", "\u180e": "MVS", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ", "\u200e": "LRM",
  "\u200f": "RLM", "\u2028": "LSEP", "\u2029": "PSEP", "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF",
  "\u202d": "LRO", "\u202e": "RLO", "\u2060": "WJ", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI",
  "\u2069": "PDI", "\u3164": "HF", "\ufeff": "BOM", "\uffa0": "HHF",
}));
const JOINED = /\p{Extended_Pictographic}[\p{Emoji_Modifier}\u{fe0f}]*\u200d(?=\p{Extended_Pictographic})/gu; // 👩‍🔬 is one picture
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u115f\u1160\u2028\u2029\u3164\uffa0\u{e0000}-\u{e0fff}]/u;
const KEPT = new Set(["\n", "\t"]);

/** Pieces of a text as [text, hidden]. Hidden characters are replaced by a name such as "RLO" or "U+E0041". */
export function pieces(text) {
  const joiners = new Set();
  for (const match of text.matchAll(JOINED)) joiners.add(match.index + match[0].length - 1);
  const found = [];
  let plain = "";
  let at = 0;
  for (const character of text) {
    if (HIDDEN.test(character) && !KEPT.has(character) && !joiners.has(at)) {
      if (plain) found.push([plain, false]);
      found.push([nameOf(character), true]);
      plain = "";
    } else plain += character;
    at += character.length;
  }
  if (plain) found.push([plain, false]);
  return found;
}

/** The pieces as nodes. `spaces` also marks each space, tab and line break. */
export function visible(text, spaces = false) {
  if (!spaces && !HIDDEN.test(text.replaceAll("\n", ""))) return [document.createTextNode(text)];
  return pieces(text).flatMap(([piece, hidden]) => {
    if (hidden) return [h("span", { class: "hidden-character", title: "a character that cannot be seen" }, piece)];
    return spaces ? withSpaces(piece) : [document.createTextNode(piece)];
  });
}

/** The text in one line, for lists. */
export function oneLine(text) {
  return pieces(String(text)).map(([piece, hidden]) => hidden ? `⟦${piece}⟧` : piece).join("").replace(/\s+/g, " ").trim();
}

function nameOf(character) {
  const code = character.codePointAt(0);
  return CONTROLS[code] ?? NAMES.get(character) ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

const MARKS = { " ": "·", "\n": "⏎", "\t": "⇥", "\u00a0": "⍽" };

function withSpaces(piece) {
  return piece.split(/([ \n\t\u00a0])/).filter(Boolean).flatMap(part => {
    if (!(part in MARKS)) return [document.createTextNode(part)];
    return [h("span", { class: "space", "data-mark": MARKS[part] }, part)]; // CSS draws the mark, so copying gives the text
  });
}

// On the search page: shows the entries of the page of errors that fit the searched text: it has the address of one, or
// a message that one quotes, with any values.
// errorIndex (errors-index.js, written by nbs/_ext/errors.py) has [template, anchor, title] of each quoted message.
document.addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q") || "";
  const place = document.getElementById("search-results");
  const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const squeezed = (text) => text.toLowerCase().replace(/\s+/g, ""); // lines may be broken anywhere
  const words = wordsOf(query).slice(-400), text = squeezed(query);
  if (!place || words.length < 3) return;

  const templates = errorIndex.map(([template]) => wordsOf(template));
  const counts = new Map();
  for (const each of templates) for (const word of new Set(each)) counts.set(word, (counts.get(word) || 0) + 1);
  const weight = (word) => Math.log(1 + templates.length / counts.get(word)); // rare words tell more

  // The weight of the longest sequence of words that are in both texts in this order.
  function common(template) {
    let row = new Float64Array(words.length + 1);
    for (const word of template) {
      const next = new Float64Array(words.length + 1);
      const own = weight(word);
      for (let i = 0; i < words.length; i++)
        next[i + 1] = words[i] === word ? row[i] + own : Math.max(next[i], row[i + 1]);
      row = next;
    }
    return row[words.length];
  }

  // Whether all that a template has between its values is there, in this order.
  function isWhole(template) {
    let at = 0;
    for (const part of template.split("{}").map(squeezed)) {
      at = text.indexOf(part, at);
      if (at < 0) return false;
      at += part.length;
    }
    return true;
  }

  const best = new Map(); // by anchor
  errorIndex.forEach(([template, anchor, title], i) => {
    const found = common(templates[i]), all = templates[i].reduce((sum, word) => sum + weight(word), 0);
    const named = text.includes("errors.html#" + anchor + ")");
    const whole = named || (templates[i].length > 1 && isWhole(template));
    if (!whole && (found < 12 || (found < 0.5 * all && found < 30))) return; // a message may be cut off
    const score = found * (found / all) * (whole ? 2 : 1) + (named ? 1000 : 0);
    if (!best.has(anchor) || best.get(anchor).score < score) best.set(anchor, { score, template, anchor, title });
  });
  const sorted = [...best.values()].sort((a, b) => b.score - a.score);
  const shown = sorted.filter((each) => each.score > 0.3 * sorted[0].score).slice(0, 3);
  if (!shown.length) return;

  const list = document.createElement("ul");
  list.className = "search error-matches";
  for (const { anchor, title, template } of shown) {
    const item = list.appendChild(document.createElement("li"));
    const link = item.appendChild(document.createElement("a"));
    link.href = "errors.html#" + anchor;
    link.textContent = title;
    item.appendChild(document.createElement("p")).textContent = template.replaceAll("{}", "…");
  }
  const heading = document.createElement("h2");
  heading.textContent = "On the page of errors";
  place.before(heading, list);
});

// On the search page: shows with each result what kind of page it is on, and the text around the first word found.
// searchTexts (search-texts.js, written by nbs/_ext/search.py) has the text of each page.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("search-results");
  const query = new URLSearchParams(location.search).get("q") || "";
  const words = query.match(/[\p{L}\p{N}_]{2,}/gu) || [];
  if (!place || !words.length) return;
  const kinds = { guides: "guide", reference: "reference", explanations: "explanation", coming_from: "comparison" };
  const escaped = words.map((word) => word.replace(/s$/i, "").replace(/_/g, "[_]")).join("|");
  const root = new URL(document.documentElement.dataset.content_root || "./", location.href).href;

  function excerpt(text, heading) {
    const from = Math.max(0, text.indexOf(heading)); // of a section: in that section
    let found = text.slice(from + heading.length).search(new RegExp(escaped, "i"));
    found = found < 0 ? text.search(new RegExp(escaped, "i")) : from + heading.length + found;
    if (found < 0) return text.slice(0, 200);
    const start = found < 90 ? 0 : text.indexOf(" ", found - 90) + 1;
    return (start ? "… " : "") + text.slice(start, start + 240) + " …";
  }

  function complete(item) {
    const link = item.querySelector("a");
    if (!link || !link.href.startsWith(root) || item.querySelector(".search-excerpt")) return;
    const page = decodeURI(link.href.slice(root.length).split(/[#?]/)[0]).replace(/\.html$/, "");
    const kind = kinds[page.split("/")[0]] || (/^\d/.test(page) ? "tutorial" : "");
    if (kind) {
      const label = document.createElement("span");
      link.after(label);
      label.className = "search-kind";
      label.textContent = kind;
    }
    if (!searchTexts[page]) return;
    const shown = item.appendChild(document.createElement("p"));
    shown.className = "search-excerpt";
    const heading = link.textContent.split(" > ").pop();
    for (const part of excerpt(searchTexts[page], heading).split(new RegExp(`(${escaped})`, "i")))
      if (new RegExp(`^(${escaped})$`, "i").test(part)) shown.appendChild(document.createElement("mark")).textContent = part;
      else shown.append(part);
  }

  new MutationObserver(() => place.querySelectorAll("ul.search > li").forEach(complete)).observe(place, {
    childList: true,
    subtree: true,
  });
});

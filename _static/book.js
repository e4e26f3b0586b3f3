// A page opened from a file may not fetch others: show search results without excerpts there.
addEventListener("DOMContentLoaded", () => {
  if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
});

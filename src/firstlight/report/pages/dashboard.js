// Asks for the page anew every few seconds, and puts what changed in the place of what was shown.
(() => {
  const search = document.getElementById("search"), update = document.getElementById("update");
  const live = document.getElementById("live");
  const milliseconds = 2000;
  let tag = "", timer = 0, asked = 0;
  const redraw = (text) => {
    const chosen = [...live.querySelectorAll("input:checked")].map((one) => one.id);
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    const found = new DOMParser().parseFromString(text, "text/html");
    document.title = found.title;
    live.replaceChildren(...found.getElementById("live").childNodes);
    for (const id of chosen) {
      const input = document.getElementById(id);
      if (input) input.checked = true;
    }
    if (focused) document.getElementById(focused)?.focus();
    document.dispatchEvent(new Event("redrawn"));
  };
  const ask = async () => {
    clearTimeout(timer);
    const number = ++asked;
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const place = "/?q=" + encodeURIComponent(search.value);
      const reply = await fetch(place, { headers, cache: "no-store" });
      const text = await reply.text();
      if (number !== asked) return;
      if (reply.ok) {
        tag = reply.headers.get("ETag");
        redraw(text);
      }
      const failed = !reply.ok && reply.status !== 304;
      update.textContent = failed ? text : "updated " + new Date().toLocaleTimeString();
    } catch {
      if (number !== asked) return;
      update.textContent = "the dashboard has ended: start it again";
    }
    timer = setTimeout(ask, milliseconds);
  };
  search.addEventListener("input", ask);
  ask();
})();

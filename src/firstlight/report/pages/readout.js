"use strict";
// Values under the pointer. All figures are in the page without it.
(() => {
  const shown = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(3);
    if (Number.isInteger(value) || size >= 1e5) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(5)));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  };
  const row = (tip, style, name, value) => {
    const line = tip.appendChild(document.createElement("div"));
    if (style) line.appendChild(document.createElement("i")).className = "key " + style;
    line.appendChild(document.createElement("span")).textContent = name;
    line.appendChild(document.createElement("b")).textContent = value;
  };
  const follow = (svg, data) => {
    const [x0, x1, left, right, top, bottom] = svg.dataset.ends.split(" ").map(Number);
    const { width, height } = svg.viewBox.baseVal;
    const tip = svg.parentNode.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    const cross = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    cross.setAttribute("class", "cross");
    const xAt = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cross.removeAttribute("d");
    });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const pixel = (event.clientX - box.left) * width / box.width;
      const x = x0 + (pixel - left) / (width - left - right) * (x1 - x0);
      const points = data.curves.map((curve) => {
        const i = nearest(curve.x, x);
        return { x: curve.x[i], y: curve.y[i], style: curve.style, name: curve.name };
      });
      const distance = (point) => Math.abs(point.x - x);
      const at = points.reduce((a, b) => (distance(b) < distance(a) ? b : a)).x;
      tip.replaceChildren();
      row(tip, "", data.x, shown(at));
      for (const point of points) {
        const isApart = Math.abs(point.x - at) > (x1 - x0) / 200;
        const place = isApart ? ` (${data.x} ${shown(point.x)})` : "";
        row(tip, point.style, point.name, shown(point.y) + place);
      }
      cross.setAttribute("d", `M${xAt(at)} ${top}V${height - bottom}`);
      tip.hidden = false;
      const place = xAt(at) * box.width / width, room = tip.offsetWidth + 14;
      tip.style.left = `${place + room > box.width ? Math.max(place - room, 0) : place + 14}px`;
    });
  };
  for (const holder of document.querySelectorAll("[data-curves]")) {
    const data = JSON.parse(holder.dataset.curves);
    for (const svg of holder.querySelectorAll("svg")) if (svg.dataset.ends) follow(svg, data);
  }
})();

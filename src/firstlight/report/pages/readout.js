"use strict";
// Values under the pointer. All figures are in the page without it.
(() => {
  const svgNames = "http://www.w3.org/2000/svg";
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
  const added = (parent, name) => parent.appendChild(document.createElementNS(svgNames, name));
  const row = (tip, style, name, value) => {
    const line = tip.appendChild(document.createElement("div"));
    if (style) line.appendChild(document.createElement("i")).className = "key " + style;
    line.appendChild(document.createElement("span")).textContent = name;
    line.appendChild(document.createElement("b")).textContent = value;
  };
  const follow = (svg, data) => {
    const ends = svg.dataset.ends.split(" ").map(Number);
    const [x0, x1, y0, y1, log, left, right, top, bottom] = ends;
    const { width, height } = svg.viewBox.baseVal;
    const curves = data.curves;
    const plot = svg.parentNode;
    const tip = plot.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    const cross = added(svg, "path");
    cross.setAttribute("class", "cross");
    const dots = curves.map((curve) => {
      const dot = added(svg, "circle");
      dot.setAttribute("class", "dot " + curve.style.replace("faint", ""));
      dot.setAttribute("r", 0);
      return dot;
    });
    const xAt = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    const share = (y) => log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
    const yAt = (y) => height - bottom - share(y) * (height - top - bottom);
    const leave = () => {
      tip.hidden = true;
      cross.removeAttribute("d");
      dots.forEach((dot) => dot.setAttribute("r", 0));
    };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const pixel = (event.clientX - box.left) * width / box.width;
      const x = x0 + (pixel - left) / (width - left - right) * (x1 - x0);
      const found = curves.map((curve) => nearest(curve.x, x));
      let at = null;
      curves.forEach((curve, i) => {
        const there = curve.x[found[i]];
        if (at === null || Math.abs(there - x) < Math.abs(at - x)) at = there;
      });
      tip.replaceChildren();
      row(tip, "", data.x, shown(at));
      curves.forEach((curve, i) => {
        const there = curve.x[found[i]], value = curve.y[found[i]];
        const hidden = log && !(value > 0);
        dots[i].setAttribute("r", hidden ? 0 : 4);
        if (hidden) return;
        dots[i].setAttribute("cx", xAt(there));
        dots[i].setAttribute("cy", yAt(value));
        const apart = Math.abs(there - at) > (x1 - x0) / 200;
        row(tip, curve.style, curve.name, shown(value) + (apart ? ` (${data.x} ${shown(there)})` : ""));
      });
      cross.setAttribute("d", `M${xAt(at)} ${top}V${height - bottom}`);
      tip.hidden = false;
      const place = xAt(at) * box.width / width, room = tip.offsetWidth + 14;
      tip.style.left = `${place + room > box.width ? Math.max(place - room, 0) : place + 14}px`;
    });
  };
  const followAll = () => {
    for (const holder of document.querySelectorAll("[data-curves]")) {
      const data = JSON.parse(holder.dataset.curves);
      for (const svg of holder.querySelectorAll("svg")) if (svg.dataset.ends) follow(svg, data);
    }
  };
  followAll();
  document.addEventListener("redrawn", followAll);
})();

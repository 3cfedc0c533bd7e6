// The Content-Security-Policy blocks images from other machines. This script prevents the page from
// requesting them, and shows their URL instead.
"use strict";
(() => {
  const own = (value) => {
    try {
      const url = new URL(value, location.href);
      return url.origin === location.origin || ["data:", "blob:"].includes(url.protocol);
    } catch {
      return false;
    }
  };
  const note = (image, url) => {
    image.title = "not shown, since it is on another machine: " + url;
  };
  const image = HTMLImageElement.prototype;
  for (const name of ["src", "srcset"]) {
    const plain = Object.getOwnPropertyDescriptor(image, name);
    const set = function (value) {
      own(value) ? plain.set.call(this, value) : note(this, value);
    };
    Object.defineProperty(image, name, { ...plain, set });
  }
  const plainly = Element.prototype.setAttribute;
  image.setAttribute = function (name, value) {
    const fetched = /^(src|srcset)$/i.test(name) && !own(value);
    fetched ? note(this, value) : plainly.call(this, name, value);
  };
})();

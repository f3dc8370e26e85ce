// As much of a browser as the page needs, to run its script in an engine without one.
class Node_ {
  constructor(name) {
    Object.assign(this, { name, style: {}, heard: {}, attributes: {}, children: [], textContent: "", innerHTML: "" });
    Object.assign(this, { offsetWidth: 100, offsetHeight: 50, className: "" });
  }
  append(...nodes) { this.children.push(...nodes); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, heard) { (this.heard[name] = this.heard[name] || []).push(heard); }
  getBoundingClientRect() { return { left: 0, top: 0, width: 1208, height: 300 }; }
  happens(name, facts) {
    for (const heard of this.heard[name] || []) heard({ preventDefault() {}, clientX: 0, clientY: 0, ...facts });
  }
}
const named = { panels: new Node_("main"), about: new Node_("div"), data: new Node_("script") };
const document = {
  getElementById: id => named[id],
  createElement: name => new Node_(name),
  createElementNS: (_, name) => new Node_(name),
};
const window = Object.assign(new Node_("window"), { innerWidth: 1400, innerHeight: 800 });
